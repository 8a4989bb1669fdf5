"""The framework of the ``gpuspawner`` command: the application, parameters, output and checks."""

DEFAULT_FILE = "jupyterhub_config.py"
"""The hub's configuration, unless the command line names another file."""
