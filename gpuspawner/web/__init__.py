"""Framework for the service's pages and its REST API."""
