"""A stand-in for ``nvidia-smi mig``: makes and destroys instances in the fleet's file.

It is a program of its own and imports nothing of ours. The fleet's file is the machine's state, as
nvml_standin.c reads it. Like the driver, it refuses while another process has NVML open. Beside the
fleet's file, a test can put:

* ``FLEET.refuses``: a command, such as ``-dgi``, that says "In use by another client";
* ``FLEET.waits``: a FIFO; each call waits until the test has opened and closed it;
* ``FLEET.dies_at``: a number; at so many of the points that it passes, counted over all calls in
  ``FLEET.points``, it kills its parent and, unless the number has a ``+`` after it, itself.

``FLEET.calls`` lists the arguments of each call.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import signal
import sys
import uuid
from pathlib import Path
from typing import NoReturn

FLEET = Path(os.environ["GPUSPAWNER_STANDIN_NVML"])
INSUFFICIENT, IN_USE, NO_SUCH = 11, 19, 6


def beside(suffix: str) -> Path:
    return FLEET.with_name(f"{FLEET.name}.{suffix}")


def fail(code: int, text: str) -> NoReturn:
    print(text)
    sys.exit(code)


def is_killed_here() -> bool:
    """Whether this is the point at which the test kills; counts it."""
    told = beside("dies_at")
    if not told.exists():
        return False
    count = int(beside("points").read_text()) + 1 if beside("points").exists() else 1
    beside("points").write_text(str(count))
    return count == int(told.read_text().rstrip("+"))


def point() -> None:
    """Pass a point at which a test may kill the caller."""
    if is_killed_here():
        os.kill(os.getppid(), signal.SIGKILL)
        if not beside("dies_at").read_text().endswith("+"):
            os.kill(os.getpid(), signal.SIGKILL)


def is_watched() -> bool:
    """Whether another process has NVML open."""
    for each in beside("clients").glob("*"):
        with each.open("r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    return False


class GPU:
    """One GPU's part of the fleet's file: its own lines, and those of each of its MIG devices."""

    def __init__(self, index: int, lines: list[str]) -> None:
        self.index = index
        starts = [n for n, line in enumerate(lines) if line.startswith("mig ")] + [len(lines)]
        self.own = lines[: starts[0]]
        self.parts = [lines[a:b] for a, b in itertools.pairwise(starts)]

    def of(self, key: str) -> list[list[str]]:
        return [line.split()[1:] for line in self.own if line.split()[0] == key]

    def word(self, key: str) -> str:
        return next(line.partition(" ")[2] for line in self.own if line.startswith(f"{key} "))

    @property
    def instances(self) -> dict[int, tuple[int, int, int]]:
        """Profile, start and size of each instance, by its id."""
        return {int(i[0]): (int(i[1]), int(i[2]), int(i[3])) for i in self.of("instance")}

    def parts_of(self, id: int) -> list[list[str]]:
        return [part for part in self.parts if f"of {id}" in part]

    def lines(self) -> list[str]:
        return [*self.own, *(line for part in self.parts for line in part)]


def read() -> tuple[list[str], list[GPU]]:
    lines = FLEET.read_text().splitlines()
    starts = [n for n, line in enumerate(lines) if line.startswith("gpu ")] + [len(lines)]
    gpus = [GPU(n, lines[a:b]) for n, (a, b) in enumerate(itertools.pairwise(starts))]
    return lines[: starts[0]], gpus


def write(head: list[str], gpus: list[GPU]) -> None:
    new = beside("next")
    new.write_text("\n".join([*head, *(line for gpu in gpus for line in gpu.lines())]) + "\n")
    new.replace(FLEET)


def make_instance(gpu: GPU, wanted: str) -> int:
    name, _, at = wanted.partition(":")
    profile = next((p for p in gpu.of("profile") if name in (p[1], p[2])), None)
    if gpu.word("migmode") != "1" or profile is None:
        fail(
            3,
            f"Unable to create a GPU instance on GPU {gpu.index} using profile {name}: "
            "Not Supported",
        )
    size = int(profile[6])
    taken = [(start, start + length) for _, start, length in gpu.instances.values()]
    same = sum(each[0] == int(profile[1]) for each in gpu.instances.values())
    starts = [int(at)] if at else [int(start) for start in profile[7:]]
    free = [
        start
        for start in starts
        if str(start) in profile[7:] and all(start >= b or start + size <= a for a, b in taken)
    ]
    if not free or same >= int(profile[4]):
        fail(
            INSUFFICIENT,
            f"Unable to create a GPU instance on GPU {gpu.index} using profile "
            f"{name}: Insufficient Resources",
        )
    id = min(set(range(1, 20)) - gpu.instances.keys())
    gpu.own.append(f"instance {id} {profile[1]} {free[0]} {size}")
    print(f"Successfully created GPU instance ID {id} on GPU {gpu.index} using profile {name}")
    return id


def make_device(gpu: GPU, id: int) -> None:
    if gpu.parts_of(id):
        fail(
            INSUFFICIENT,
            f"Unable to create a compute instance on GPU {gpu.index} GPU instance "
            f"ID {id}: Insufficient Resources",
        )
    kind = next(p for p in gpu.of("profile") if int(p[1]) == gpu.instances[id][0])
    slot = min(set(range(7)) - {int(part[0].split()[1]) for part in gpu.parts})
    part = [f"mig {slot} MIG-{uuid.uuid4()}", f"name {gpu.word('name')} MIG {kind[2]}"]
    gpu.parts.append([*part, f"memory {int(kind[5]) * 2**20}", "used 0", f"of {id}"])
    print(f"Successfully created compute instance ID 0 on GPU {gpu.index} GPU instance ID {id}")


def main(words: list[str]) -> None:
    with beside("calls").open("a") as calls:
        calls.write(" ".join(words) + "\n")
    assert words[:2] == ["mig", "-i"], words
    command, rest = words[3], words[4:]
    if beside("waits").exists():
        beside("waits").read_text()
    point()
    if is_watched() or (
        beside("refuses").exists() and beside("refuses").read_text().strip() == command
    ):
        fail(IN_USE, "Unable to change GPU instances: In use by another client")
    head, gpus = read()
    gpu = next(g for g in gpus if words[2] in (g.word("gpu"), str(g.index)))
    if command == "-cgi":
        made = [make_instance(gpu, wanted) for wanted in rest[0].split(",")]
        write(head, gpus)
        point()
        for id in made if "-C" in rest else ():
            make_device(gpu, id)
    else:
        id = int(rest[rest.index("-gi") + 1])
        if id not in gpu.instances:
            fail(NO_SUCH, f"No GPU instance ID {id} on GPU {gpu.index}: Not Found")
        if command == "-cci":
            make_device(gpu, id)
        elif command == "-dci":
            gpu.parts = [part for part in gpu.parts if part not in gpu.parts_of(id)]
        elif gpu.parts_of(id):
            fail(IN_USE, f"Unable to destroy GPU instance ID {id}: In use by another client")
        else:
            gpu.own = [line for line in gpu.own if not line.startswith(f"instance {id} ")]
    write(head, gpus)
    point()


if __name__ == "__main__":
    main(sys.argv[1:])
