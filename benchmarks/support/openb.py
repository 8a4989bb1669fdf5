"""The workload and the machines of Alibaba's published GPU trace of 2023, "openb".

From the trace's own files (alibaba/clusterdata, cluster-trace-gpu-v2023), which also belong to FGD
(Weng et al., "Beware of Fragmentation", USENIX ATC 2023):

* :data:`MACHINES` counts the rows of ``openb_node_list_gpu_node.csv``, all of them: 1,213 nodes
  with 6,212 GPUs.
* :data:`SHARES`, how many GPUs the pods of ``openb_pod_list_default.csv`` ask for, is the paper's
  table of the 8,152 pods.
* :data:`SEEN` counts 1,472 rows of that file in seven runs of consecutive rows, spread over the
  whole file and read by eye: CPU, memory and part of the GPU of each kind of pod. In them the
  shares are 13.3, 34.8, 51.0, 0.1, 0.5 and 0.2 %; a pod is drawn by :data:`SHARES` first, then by
  the rows of its kind. Of pods with two, four and eight GPUs only 2, 8 and 3 were seen.

What this does not have: the order of the trace, in which pods of one kind come in bursts, and the
rare kinds that those rows missed. With the files at hand use :func:`read_pods` and
:func:`read_machines`.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

WHOLE = 1000
"""A GPU, in the trace's unit."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A node of the trace."""

    cpu: int
    """Thousandths of a processor."""
    memory: int
    """MiB."""
    gpus: int
    model: str


@dataclass(frozen=True, slots=True)
class Pod:
    """What one pod asks for, in the same units."""

    cpu: int
    memory: int
    gpus: int
    part: int
    """Of each GPU, in thousandths: :data:`WHOLE` or less for one GPU, 0 without a GPU."""

    @property
    def asked(self) -> int:
        """Thousandths of a GPU in all."""
        return self.gpus * self.part


MACHINES: Sequence[tuple[int, Machine]] = (
    (549, Machine(96000, 393216, 8, "G2")),
    (387, Machine(104000, 524288, 2, "T4")),
    (107, Machine(16000, 122880, 2, "P100")),
    (39, Machine(128000, 786432, 8, "G3")),
    (28, Machine(32000, 131072, 4, "V100M16")),
    (22, Machine(64000, 262144, 2, "P100")),
    (21, Machine(96000, 786432, 8, "V100M32")),
    (19, Machine(8000, 32768, 1, "V100M16")),
    (17, Machine(96000, 393216, 4, "T4")),
    (9, Machine(48000, 376832, 4, "V100M32")),
    (7, Machine(64000, 262144, 8, "V100M16")),
    (3, Machine(8000, 61440, 1, "P100")),
    (2, Machine(8000, 61440, 2, "P100")),
    (2, Machine(128000, 1048576, 1, "A10")),
    (1, Machine(82000, 344064, 8, "V100M16")),
)
"""How many of each."""

SHARES: Sequence[tuple[str, float]] = (
    ("0", 13.3),
    ("part", 37.8),
    ("1", 48.0),
    ("2", 0.2),
    ("4", 0.2),
    ("8", 0.5),
)
"""Percent of the pods that ask for so many GPUs; ``part`` is less than one."""

SEEN = """\
32000,49152,0,0,65 12500,57344,0,0,56 8000,30517,0,0,37 16500,51200,0,0,17 15400,51200,0,0,6
16000,31250,0,0,4 8000,15625,0,0,2 8000,8192,0,0,1 8000,31250,0,0,1 8000,61035,0,0,1
12000,24576,0,0,1 16000,16384,0,0,1 20000,65536,0,0,1 32000,32768,0,0,1 32000,62500,0,0,1
32000,65536,0,0,1
3152,5600,1,810,167 11908,47104,1,470,63 8000,30517,1,470,58 11908,47104,1,650,44
4000,22888,1,320,36 3152,5600,1,590,18 4000,15258,1,320,14 8000,30517,1,320,12
4152,10600,1,550,10 4152,10600,1,810,10 6000,12288,1,460,9 4000,15258,1,160,8
4000,22888,1,480,8 6000,6144,1,460,7 4000,30517,1,320,6 1000,2048,1,320,4 4000,22888,1,230,4
8000,30517,1,220,4 4000,15258,1,110,3 4000,15258,1,220,3 6000,16384,1,460,3
6000,22888,1,160,3 8000,30517,1,230,3 4000,22888,1,220,2 6000,8192,1,460,2
8000,30517,1,650,2 4000,15258,1,50,1 4000,22888,1,330,1 4000,30517,1,220,1
4000,30517,1,230,1 4152,10600,1,270,1 4152,10600,1,370,1 6000,18432,1,460,1
6000,23552,1,460,1 8000,30517,1,440,1
11300,49152,1,1000,160 11400,48128,1,1000,92 3152,5600,1,1000,91 15700,58368,1,1000,56
18708,64512,1,1000,50 9810,41560,1,1000,48 12000,24576,1,1000,34 16000,32768,1,1000,26
11908,47104,1,1000,25 12000,16384,1,1000,25 4000,24576,1,1000,21 8000,16384,1,1000,15
11400,77824,1,1000,12 11900,77824,1,1000,12 15200,80896,1,1000,10 8200,33792,1,1000,9
24200,93184,1,1000,9 8000,32768,1,1000,8 4000,31250,1,1000,7 16000,65536,1,1000,7
7000,30000,1,1000,3 12000,15360,1,1000,3 12000,32768,1,1000,3 12000,49152,1,1000,3
16000,49152,1,1000,3 4000,16384,1,1000,2 11300,37888,1,1000,2 11900,43008,1,1000,2
12000,47104,1,1000,2 14900,73728,1,1000,2 15400,90112,1,1000,2 16400,125952,1,1000,2
1000,6144,1,1000,1 8000,24576,1,1000,1 12000,12288,1,1000,1 16000,16384,1,1000,1
16000,31250,1,1000,1
6000,65536,2,1000,1 30200,160768,2,1000,1
32200,132096,4,1000,4 32000,131072,4,1000,2 60200,320512,4,1000,2
64000,262144,8,1000,1 88000,327680,8,1000,1 120000,737280,8,1000,1
"""
"""CPU, memory, GPUs, part of each and the number of rows."""


def published_machines() -> list[Machine]:
    """The trace's nodes with a GPU."""
    return [machine for count, machine in MACHINES for _ in range(count)]


def published_pods() -> dict[Pod, float]:
    """The kinds of pods, and how frequent each is: together 1."""
    rows: dict[str, dict[Pod, int]] = {name: {} for name, _ in SHARES}
    for text in SEEN.split():
        cpu, memory, gpus, part, count = map(int, text.split(","))
        pod = Pod(cpu, memory, gpus, part)
        rows["part" if 0 < part < WHOLE else str(gpus)][pod] = count
    total = sum(percent for _, percent in SHARES)
    return {
        pod: percent / total * count / sum(rows[name].values())
        for name, percent in SHARES
        for pod, count in rows[name].items()
    }


def frequencies(pods: Sequence[Pod]) -> dict[Pod, float]:
    """How frequent each kind is among these pods: together 1."""
    found: dict[Pod, float] = {}
    for pod in pods:
        found[pod] = found.get(pod, 0) + 1 / len(pods)
    return found


def arrivals(kinds: dict[Pod, float], random: Random) -> Iterator[Pod]:
    """Draw pods without end."""
    pods, weights = list(kinds), list(kinds.values())
    while True:
        yield from random.choices(pods, weights, k=1000)


def read_pods(path: str) -> list[Pod]:
    """Read a file with the columns of ``openb_pod_list_default.csv``."""
    with open(path, encoding="utf-8", newline="") as file:
        return [
            Pod(
                int(row["cpu_milli"]),
                int(row["memory_mib"]),
                int(row["num_gpu"]),
                int(row["gpu_milli"]) if int(row["num_gpu"]) else 0,
            )
            for row in csv.DictReader(file)
        ]


def read_machines(path: str) -> list[Machine]:
    """Read a file with the columns of ``openb_node_list_gpu_node.csv``."""
    with open(path, encoding="utf-8", newline="") as file:
        return [
            Machine(int(row["cpu_milli"]), int(row["memory_mib"]), int(row["gpu"]), row["model"])
            for row in csv.DictReader(file)
            if int(row["gpu"])
        ]
