"""Share GPUs fairly from JupyterHub."""

__version__ = "0.1.0"
