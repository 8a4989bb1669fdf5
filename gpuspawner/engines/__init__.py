"""Engines that run servers (Docker, local processes), without JupyterHub."""
