"""What runs servers (Docker, local processes), without JupyterHub."""
