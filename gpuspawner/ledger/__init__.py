"""Credits: accounts, transfers, prices, refills and statements."""
