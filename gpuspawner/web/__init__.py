"""The framework of the service's pages and of its REST API."""
