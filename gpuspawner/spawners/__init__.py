"""Spawners that lease GPUs. Set one of them as ``c.JupyterHub.spawner_class``."""
