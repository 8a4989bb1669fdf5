"""The accounting service: the application, its duties, and the client of the Hub's API."""
