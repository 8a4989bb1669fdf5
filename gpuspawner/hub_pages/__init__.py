"""Pages that the Hub process serves: the catalog and the welcome page."""
