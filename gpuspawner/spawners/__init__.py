"""Spawners that lease GPUs: put one of them into ``c.JupyterHub.spawner_class``."""
