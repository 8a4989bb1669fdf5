"""The program of a device probe, which needs nothing installed.

It runs in a container or as a process: ``python3 -c SOURCE UUID``, with Python 3.8 or later. It
opens the device with CUDA's own library, fills most of its free memory and reads it back. Prints
one line: ``ok TEXT``, ``failed TEXT``, or ``untried TEXT`` without CUDA.
"""

from __future__ import annotations

import ctypes
import sys
import time
from typing import Any

PIECE = 64 * 2**20
"""Bytes per allocation."""
PART = 0.9
"""The share of the free memory that is tested."""
SECONDS = 15.0
"""Testing stops after this time."""


class ProbeFailed(Exception):
    """The device failed. The message says at what."""


def main(uuid: str) -> str:
    """Probe the device, and return the line to print."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "untried there is no CUDA library here"
    try:
        return f"ok {probe(cuda, uuid)}"
    except ProbeFailed as failure:
        return f"failed {failure}"


def probe(cuda: Any, uuid: str) -> str:
    """Probe the device, and return what was tried. Raises ProbeFailed."""
    ask(cuda, "start CUDA", "cuInit", 0)
    count, device = ctypes.c_int(), ctypes.c_int()
    ask(cuda, "count devices", "cuDeviceGetCount", ctypes.byref(count))
    if count.value != 1:
        raise ProbeFailed(f"{count.value} devices are visible instead of one")
    ask(cuda, "find the device", "cuDeviceGet", ctypes.byref(device), 0)
    must_be(cuda, device, uuid)
    context = ctypes.c_void_p()
    ask(cuda, "open the device", "cuCtxCreate_v2", ctypes.byref(context), 0, device)
    try:
        done = try_memory(cuda)
        ask(cuda, "finish", "cuCtxSynchronize")
    finally:
        cuda.cuCtxDestroy_v2(context)
    return f"{done / 2**30:.1f} GiB filled and read back"


def must_be(cuda: Any, device: Any, uuid: str) -> None:
    """Raise ProbeFailed for another device. CUDA reports instances by their GPU, so skip those."""
    if not uuid.startswith("GPU-"):
        return
    found = (ctypes.c_ubyte * 16)()
    ask(cuda, "name the device", "cuDeviceGetUuid", ctypes.byref(found), device)
    if bytes(found).hex() != uuid[4:].replace("-", "").lower():
        raise ProbeFailed(f"another device is visible ({bytes(found).hex()})")


def try_memory(cuda: Any) -> int:
    """Fill memory and read it back; returns how many bytes."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    ask(cuda, "tell its memory", "cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    size = min(PIECE, int(free.value * PART)) // 4 * 4
    pieces: list[Any] = []
    end = time.monotonic() + SECONDS / 2
    while size and (len(pieces) + 1) * size <= free.value * PART and time.monotonic() < end:
        piece = ctypes.c_uint64()
        ask(cuda, "allocate memory", "cuMemAlloc_v2", ctypes.byref(piece), ctypes.c_size_t(size))
        value = ctypes.c_uint(pattern(len(pieces)))
        ask(cuda, "write memory", "cuMemsetD32_v2", piece, value, ctypes.c_size_t(size // 4))
        pieces.append(piece)
    if not pieces:
        raise ProbeFailed("no memory is free")
    return sum(size for _ in read_back(cuda, pieces, size, end + SECONDS / 2))


def read_back(cuda: Any, pieces: Any, size: int, end: float) -> Any:
    """Compare the memory with its pattern until ``end``. Raises ProbeFailed.

    The C library compares a piece with itself, shifted by a word: building what is expected for
    each would take Python ten times as long as reading it.
    """
    page_locked = ctypes.c_void_p()
    if cuda.cuMemAllocHost_v2(ctypes.byref(page_locked), ctypes.c_size_t(size)):
        pageable = ctypes.create_string_buffer(size)  # slower, but always allowed
        at = ctypes.addressof(pageable)
    else:
        at = page_locked.value or 0
    memcmp = ctypes.CDLL(None).memcmp
    memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    first = ctypes.c_uint.from_address(at)
    for number, piece in enumerate(pieces):
        buffer = ctypes.c_void_p(at)
        ask(cuda, "read memory", "cuMemcpyDtoH_v2", buffer, piece, ctypes.c_size_t(size))
        if first.value != pattern(number) or memcmp(at, at + 4, size - 4):
            where = f"{number * size / 2**30:.1f} GiB"
            raise ProbeFailed(f"memory changed by itself, {where} from its start")
        yield piece
        if time.monotonic() > end:
            return


def pattern(number: int) -> int:
    """Return alternating ones and zeros, different in each piece."""
    return 0xA5A50000 ^ (number * 0x10001 & 0xFFFFFFFF)


def ask(cuda: Any, what: str, function: str, *arguments: Any) -> None:
    """Call a CUDA function. Raises ProbeFailed with what was attempted."""
    code = getattr(cuda, function)(*arguments)
    if code:
        name = ctypes.c_char_p()
        cuda.cuGetErrorName(code, ctypes.byref(name))
        raise ProbeFailed(f"it could not {what} ({(name.value or b'').decode() or code})")


if __name__ == "__main__":
    print(main(sys.argv[1] if len(sys.argv) > 1 else ""))
