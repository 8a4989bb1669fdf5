"""What people read of environments before they choose: on the Hub's own pages and the form."""
