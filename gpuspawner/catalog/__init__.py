"""The catalog of environments that members choose from."""
