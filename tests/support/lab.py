"""The modules that images copy for JupyterLab, as this process imports them."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from tests.support.processes import REPO

LAB = REPO / "images" / "common" / "lab"


def load_lab_module(name: str) -> Any:
    """Import a module of the folder under its own name, by which jupyter_client finds it."""
    spec = importlib.util.spec_from_file_location(name, LAB / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
