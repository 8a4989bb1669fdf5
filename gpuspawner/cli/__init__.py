"""The framework of the ``gpuspawner`` command: the application, output and checks."""
