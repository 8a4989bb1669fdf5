"""Whether the machine's driver is new enough for an environment. Pure."""

from __future__ import annotations

import re

from ..errors import TooMuchAsked
from ..model import Inventory, Request


def must_run(request: Request, inventory: Inventory) -> None:
    """Raises TooMuchAsked when the driver, or the CUDA version that it offers, is too old.

    One that nobody can tell, as of simulated devices, is no reason to refuse.
    """
    if not request.devices:
        return
    name = f"The environment {request.environment!r}" if request.environment else "This environment"
    for what, needed, there in (
        ("NVIDIA driver", request.min_driver, inventory.driver_version),
        ("CUDA", request.min_cuda, inventory.cuda_version),
    ):
        if _is_older(there, needed):
            raise TooMuchAsked(
                f"{name} needs {what} {needed} or newer, and this machine has {there}. Start it "
                "without a GPU, choose another, or ask your admin for a newer driver."
            )


def _is_older(there: str, needed: str) -> bool:
    if not needed or not re.match(r"[0-9]", there):
        return False
    ours, theirs = _numbers(there), _numbers(needed)
    return ours + (0,) * (len(theirs) - len(ours)) < theirs


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"[0-9]+", version)[:4])
