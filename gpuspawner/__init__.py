"""Share GPUs fairly from JupyterHub."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = ["__version__", "add_services"]

if TYPE_CHECKING:
    from .config import add_services


def __getattr__(name: str) -> Any:
    """Import ``add_services`` on first access, because its modules are not always needed."""
    if name == "add_services":
        from .config import add_services

        return add_services
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
