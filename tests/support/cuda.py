"""Programs on a real GPU: CUDA's own library by ctypes, driven line by line from another process.

``Program()`` starts one: ``tell("hold", 2**30)`` answers when it is done, and ``send`` and
``read`` do the same in two steps. Memory is plain, never managed. The kernels are PTX, which the
driver compiles for whatever GPU it finds.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

REPO = Path(__file__).resolve().parents[2]

EACH_WORD = """
    mov.u32 %block, %ctaid.x;
    mov.u32 %size, %ntid.x;
    mov.u32 %thread, %tid.x;
    mov.u32 %blocks, %nctaid.x;
    mad.lo.u32 %first, %block, %size, %thread;
    mul.lo.u32 %stride, %blocks, %size;
    cvt.u64.u32 %at, %first;
    cvt.u64.u32 %step, %stride;
Next:
    setp.ge.u64 %over, %at, %words;
    @%over bra Done;
    add.u64 %value, %at, %seed;
    mul.lo.u64 %value, %value, 0x9E3779B97F4A7C15;
    shl.b64 %address, %at, 3;
    add.u64 %address, %address, %place;
"""
"""The beginning of a kernel that goes through words: ``%address`` and ``%value`` of each."""

PTX = """
.version 6.0
.target sm_50
.address_size 64

// Compute until so many nanoseconds have passed.
.visible .entry spin(.param .u64 nanoseconds)
{
    .reg .b64 %most, %began, %now;
    .reg .f32 %x;
    .reg .pred %again, %odd;
    ld.param.u64 %most, [nanoseconds];
    mov.u64 %began, %globaltimer;
    mov.f32 %x, 0f3F800000;
Again:
    fma.rn.f32 %x, %x, %x, %x;
    fma.rn.f32 %x, %x, %x, %x;
    fma.rn.f32 %x, %x, %x, %x;
    fma.rn.f32 %x, %x, %x, %x;
    mov.u64 %now, %globaltimer;
    sub.u64 %now, %now, %began;
    setp.lt.u64 %again, %now, %most;
    @%again bra Again;
    setp.eq.f32 %odd, %x, 0f00000000;  // never, but the compiler cannot know
    @%odd trap;
    ret;
}

// Write to address 0.
.visible .entry illegal()
{
    .reg .b64 %at;
    .reg .b32 %value;
    mov.u64 %at, 0;
    mov.u32 %value, 1;
    st.global.u32 [%at], %value;
    ret;
}

// Write to each of so many words of eight bytes a value that follows from its place and a seed.
.visible .entry fill(.param .u64 place, .param .u64 words, .param .u64 seed)
{
    .reg .b64 %place, %words, %seed, %at, %step, %value, %address;
    .reg .b32 %block, %size, %thread, %blocks, %first, %stride;
    .reg .pred %over;
    ld.param.u64 %place, [place];
    ld.param.u64 %words, [words];
    ld.param.u64 %seed, [seed];
    EACH_WORD
    st.global.u64 [%address], %value;
    add.u64 %at, %at, %step;
    bra Next;
Done:
    ret;
}

// Count the words that are not as fill wrote them.
.visible .entry differ(.param .u64 place, .param .u64 words, .param .u64 seed, .param .u64 count)
{
    .reg .b64 %place, %words, %seed, %at, %step, %value, %address, %found, %count, %old;
    .reg .b32 %block, %size, %thread, %blocks, %first, %stride;
    .reg .pred %over, %same;
    ld.param.u64 %place, [place];
    ld.param.u64 %words, [words];
    ld.param.u64 %seed, [seed];
    ld.param.u64 %count, [count];
    EACH_WORD
    ld.global.u64 %found, [%address];
    setp.eq.u64 %same, %found, %value;
    @%same bra Fine;
    atom.global.add.u64 %old, [%count], 1;
Fine:
    add.u64 %at, %at, %step;
    bra Next;
Done:
    ret;
}
""".replace("    EACH_WORD\n", EACH_WORD[1:]).encode()

NO_DEVICE = 100
BLOCKS, THREADS = 1024, 256
"""Of a kernel that goes through memory."""


class CudaError(Exception):
    """A call failed. The message names it and its error."""

    def __init__(self, function: str, code: int, name: str) -> None:
        super().__init__(f"{function}: {name} ({code})")
        self.code, self.name = code, name


class Cuda:
    """CUDA's own library, with the first device that it shows once :meth:`open` was called."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._module = ctypes.c_void_p()
        self._held: list[tuple[Any, int]] = []

    def call(self, function: str, *arguments: Any) -> None:
        """Call a function. Raises CudaError."""
        code = getattr(self._library, function)(*arguments)
        if code:
            name = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(name))
            raise CudaError(function, code, (name.value or b"").decode())

    def has(self, function: str) -> bool:
        """Return True if the library has the function."""
        return hasattr(self._library, function)

    def uuids(self) -> list[str]:
        """Return the UUIDs of all devices, as NVML writes them."""
        try:
            self.call("cuInit", 0)
        except CudaError as error:
            if error.code == NO_DEVICE:
                return []
            raise
        count, device = ctypes.c_int(), ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        found = []
        for ordinal in range(count.value):
            name = (ctypes.c_ubyte * 16)()
            self.call("cuDeviceGet", ctypes.byref(device), ordinal)
            self.call("cuDeviceGetUuid", ctypes.byref(name), device)
            text = bytes(name).hex()
            parts = (text[:8], text[8:12], text[12:16], text[16:20], text[20:])
            found.append(f"GPU-{'-'.join(parts)}")
        return found

    def open(self) -> None:
        """Open the device and load the kernels."""
        self.call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.call("cuModuleLoadData", ctypes.byref(self._module), PTX)

    def hold(self, size: int) -> None:
        """Allocate so many bytes and keep them."""
        place = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(place), ctypes.c_size_t(size))
        self._held.append((place, size))

    def spin(self, seconds: float, blocks: int = 1, threads: int = 1) -> None:
        """Let a kernel run for so long."""
        self.launch("spin", blocks, threads, ctypes.c_uint64(int(seconds * 1e9)))

    def illegal(self) -> None:
        """Let a kernel write to address 0. Raises CudaError."""
        self.launch("illegal", 1, 1)

    def fill(self, seed: int) -> None:
        """Fill all that is held with values that follow from the seed."""
        for place, size in self._held:
            numbers = (place, ctypes.c_uint64(size // 8), ctypes.c_uint64(seed))
            self.launch("fill", BLOCKS, THREADS, *numbers)

    def work(self, times: int) -> float:
        """Go through all that is held so many times; returns the seconds that it took."""
        began = time.monotonic()
        for seed in range(times):
            self.fill(seed)
        return time.monotonic() - began

    def differing(self, seed: int) -> int:
        """Return how many words of what is held are not as :meth:`fill` wrote them."""
        count, total = ctypes.c_uint64(), 0
        self.call("cuMemAlloc_v2", ctypes.byref(count), ctypes.c_size_t(8))
        for place, size in self._held:
            self.call("cuMemsetD32_v2", count, ctypes.c_uint(0), ctypes.c_size_t(2))
            numbers = (place, ctypes.c_uint64(size // 8), ctypes.c_uint64(seed), count)
            self.launch("differ", BLOCKS, THREADS, *numbers)
            found = ctypes.c_uint64()
            self.call("cuMemcpyDtoH_v2", ctypes.byref(found), count, ctypes.c_size_t(8))
            total += found.value
        self.call("cuMemFree_v2", count)
        return total

    def launch(self, kernel: str, blocks: int, threads: int, *numbers: Any) -> None:
        """Run a kernel and wait for its end. Raises CudaError."""
        function = ctypes.c_void_p()
        self.call("cuModuleGetFunction", ctypes.byref(function), self._module, kernel.encode())
        given = (ctypes.c_void_p * len(numbers))(
            *(ctypes.cast(ctypes.pointer(number), ctypes.c_void_p) for number in numbers)
        )
        shape = (blocks, 1, 1, threads, 1, 1)
        self.call("cuLaunchKernel", function, *shape, 0, None, given, None)
        self.call("cuCtxSynchronize")


class Program:
    """A process of its own that does with a GPU what it is told; ``with Program() as program``.

    Whatever is on the GPU when the process ends, the driver frees.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            env=os.environ | dict(environment or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Program:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.end()

    @property
    def pid(self) -> int:
        return self.process.pid

    def tell(self, command: str, *arguments: float) -> Any:
        """Have it do something: its answer. Raises RuntimeError if that failed or it died."""
        self.send(command, *arguments)
        return self.read()

    def send(self, command: str, *arguments: float) -> None:
        """Have it do something, and go on meanwhile."""
        assert self.process.stdin
        self.process.stdin.write(json.dumps([command, *arguments]) + "\n")
        self.process.stdin.flush()

    def read(self) -> Any:
        """Wait for the next answer. Raises RuntimeError if something failed or it died."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the program ended with {self.process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["done"]

    def end(self) -> None:
        """Kill it and wait until it is gone."""
        self.process.kill()
        self.process.communicate()


def repeat(cuda: Cuda, busy: float, rest: float, seconds: float, blocks: int = 1) -> list[float]:
    """Compute for ``busy`` seconds and rest for ``rest``, in turns; how long each turn computed."""
    until, took = time.monotonic() + seconds, []
    while (began := time.monotonic()) < until:
        if busy:
            cuda.spin(busy, blocks, 1 if blocks == 1 else 1024)
            took.append(time.monotonic() - began)
        time.sleep(min(rest, max(0.0, until - time.monotonic())))
    return took


def main() -> None:
    """Do what each line says, ``["hold", 1073741824]``, and answer with one."""
    cuda = Cuda()
    words: dict[str, Callable[..., Any]] = {
        "uuids": cuda.uuids,
        "open": cuda.open,
        "hold": cuda.hold,
        "spin": cuda.spin,
        "fill": cuda.fill,
        "work": cuda.work,
        "differing": cuda.differing,
        "illegal": cuda.illegal,
        "repeat": lambda *turns: repeat(cuda, *turns),
    }
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        try:
            print(json.dumps({"done": words[command](*arguments)}), flush=True)
        except CudaError as error:
            print(json.dumps({"error": str(error)}), flush=True)


if __name__ == "__main__":
    main()
