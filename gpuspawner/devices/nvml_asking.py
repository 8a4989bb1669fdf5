"""Asking NVML, with failures in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pynvml

T = TypeVar("T")

_ABOUT_THE_DRIVER = {
    pynvml.NVML_ERROR_UNINITIALIZED,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
}
"""Errors that concern every device, whichever was asked about."""

_SENTENCES = {
    pynvml.NVML_ERROR_UNINITIALIZED: "NVML was shut down.",
    pynvml.NVML_ERROR_NO_PERMISSION: "The hub may not ask: run it as a user that may run "
    "nvidia-smi.",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "The NVIDIA driver is not loaded: run nvidia-smi, and "
    "restart the machine after an update of the driver or the kernel.",
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "This machine has no NVIDIA driver (libnvidia-ml.so.1 "
    "was not found): install it, or let the hub simulate GPUs.",
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: "The NVIDIA driver is too old to say: update it.",
    pynvml.NVML_ERROR_GPU_IS_LOST: "The GPU is lost, it fell off the bus: restart the machine, "
    "and check the GPU's power and seat.",
    pynvml.NVML_ERROR_RESET_REQUIRED: "The GPU must be reset: run nvidia-smi --gpu-reset.",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "The NVIDIA driver was updated while in use: "
    "restart the hub, and the machine if that does not help.",
    pynvml.NVML_ERROR_UNKNOWN: "NVML gave an unknown error: run nvidia-smi, and if the hub runs "
    "in a container that lost its GPUs, restart the container.",
}


class DriverLost(Exception):
    """NVML as a whole does not answer. The text is a sentence for the inventory."""


class Unanswered(Exception):
    """A question about one device failed. The text is a reason for the device."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class Unsupported(Unanswered):
    """The device has nothing to say to this question."""


class TooOld(Unanswered):
    """The driver does not know the question."""


def ask_driver(call: Callable[[], T]) -> T:
    try:
        return call()
    except pynvml.NVMLError as error:
        raise DriverLost(sentence_of(error)) from error


def ask(what: str, call: Callable[..., T], *args: Any) -> T:
    try:
        return call(*args)
    except pynvml.NVMLError as error:
        code = error.value
        if code in _ABOUT_THE_DRIVER:
            raise DriverLost(sentence_of(error)) from error
        kind = {
            pynvml.NVML_ERROR_NOT_SUPPORTED: Unsupported,
            pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: TooOld,
        }.get(code, Unanswered)
        raise kind(f"Its {what} could not be read. {sentence_of(error)}", code) from error
    except ValueError as error:  # what a sick device returns need not be text
        text = f"Its {what} makes no sense: {error}."
        raise Unanswered(text, pynvml.NVML_ERROR_UNKNOWN) from error


def ask_or(default: T, what: str, call: Callable[..., T], *args: Any) -> T:
    """``default`` when the device or the driver does not know the question."""
    try:
        return ask(what, call, *args)
    except (Unsupported, TooOld):
        return default


def sentence_of(error: pynvml.NVMLError) -> str:
    return _SENTENCES.get(error.value) or f"NVML says: {error}."
