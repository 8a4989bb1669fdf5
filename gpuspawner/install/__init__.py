"""The installation of a hub on one machine: ``init``, ``upgrade`` and ``uninstall``."""
