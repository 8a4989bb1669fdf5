"""How much of a large cluster's GPUs can be given out: our shares against FGD, best fit and random.

Real: :class:`gpuspawner.devices.placement.PlacementIndex`, which chooses the GPUs and their slots
on the node. gpuspawner places on one machine and leaves the choice of the machine to others, such
as Slurm; here FGD or best fit stands in for them, the same as in the rows of these names. Tasks
come one after another, never leave, and are lost if they fit nowhere, until they have asked for all
GPUs of the cluster, and then for 130 %, as in the FGD paper (Weng et al., USENIX ATC 2023), whose
cluster and workload these are. ``allocated`` is what the placed tasks asked for, in percent of all
GPUs. What a share has beyond that is ``too large``: held, but not allocated. ``free`` is the rest.

With slots a task gets what gpuspawner gives: as many slots of one GPU as come to what it asks for,
or whole GPUs. All GPUs have as many slots as ``--slots`` says, each number in a row of its own.
The target is that shares to the percent are packed at least as well as FGD packs them where it
chooses the node for both.

``--pods`` and ``--nodes`` are the files ``openb_pod_list_default.csv`` and
``openb_node_list_gpu_node.csv`` of the trace (github.com/alibaba/clusterdata, in
cluster-trace-gpu-v2023). Without them, tasks are drawn from the published shares
(:mod:`support.openb`); with them, from the file's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from support.fragmentation import (
    ANY,
    Chooser,
    Filled,
    Fragments,
    Node,
    Score,
    at_random,
    best_fit,
    fgd,
    fill,
)
from support.openb import (
    Machine,
    Pod,
    arrivals,
    frequencies,
    published_machines,
    published_pods,
    read_machines,
    read_pods,
)
from support.our_slots import OurChoice, share_or_whole
from support.report import Report, Series, argument_parser, pair

from gpuspawner.devices.slots import MOST_SLOTS

ARRIVED = (1.0, 1.3)
SLOTS = (4, 10, 20, MOST_SLOTS)


@dataclass(frozen=True, slots=True)
class Trial:
    """The cluster and what comes to it."""

    machines: Sequence[Machine]
    kinds: Mapping[Pod, float]
    seed: int

    def fill(
        self,
        score: Callable[[Random], Score],
        slots: int = ANY,
    ) -> list[Filled]:
        """Fill an empty cluster; the same tasks come each time.

        With ``slots`` on each GPU, gpuspawner chooses the GPUs on the node.
        """
        random = Random(self.seed + 1)
        nodes = [Node.empty(machine, (slots,) * machine.gpus) for machine in self.machines]
        return fill(
            Chooser(nodes, score(random), random),
            arrivals(self.kinds, Random(self.seed)),
            arrived=ARRIVED,
            request=partial(share_or_whole, slots) if slots else lambda pod: pod,
            devices=OurChoice(nodes) if slots else None,
        )


def main() -> None:
    parser = argument_parser(__doc__, 3)
    parser.add_argument("--pods", help="CSV of the trace's pods")
    parser.add_argument("--nodes", help="CSV of the trace's nodes with GPUs")
    parser.add_argument("--machines", type=int, default=1, help="only each N-th node (1)")
    parser.add_argument("--slots", nargs="+", type=int, default=SLOTS, help="4 10 20 100")
    parser.add_argument("--seed", type=int, default=2026)
    args = parser.parse_args()
    machines = read_machines(args.nodes) if args.nodes else published_machines()
    kinds = frequencies(read_pods(args.pods)) if args.pods else published_pods()
    machines = machines[:: args.machines]
    trials = [Trial(machines, kinds, args.seed + number) for number in range(args.runs)]
    columns = ("policy", "allocated, %", "too large", "free", "of 130 %", "ratio to FGD")
    report = Report("packing", columns)
    report.figure("runs", args.runs)
    report.figure("gpus", sum(machine.gpus for machine in machines))
    if not args.pods:
        report.notes.append(
            "The tasks are drawn from the trace's published shares, not from its rows."
        )
    found = [trial.fill(fgd_of(kinds)) for trial in trials]
    fit = best_fit_of(machines)
    add = partial(add_row, report, found)
    add("FGD", found)
    add("best fit", [trial.fill(fit) for trial in trials])
    add("random", [trial.fill(at_random) for trial in trials])
    for slots in args.slots:
        ours = [trial.fill(fgd_of(asked(kinds, slots)), slots) for trial in trials]
        ratio = add(f"{slots} slots, node by FGD", ours)
        if slots == MOST_SLOTS:
            # A target is the most that a figure may be, so it is FGD's part of ours.
            report.figure("fgd_to_ours", 1 / ratio, most=1.0)
        add(f"{slots} slots, node by best fit", [trial.fill(fit, slots) for trial in trials])
    report.print(args.json)


def add_row(
    report: Report, baseline: Sequence[list[Filled]], name: str, runs: Sequence[list[Filled]]
) -> float:
    """Add a row; return the median ratio to FGD in the same run."""
    first = [run[0] for run in runs]
    both = pair([each.asked for each in first], [run[0].asked for run in baseline])
    percent = (
        [each.asked for each in first],
        [each.held - each.asked for each in first],
        [1 - each.held for each in first],
        [run[-1].asked for run in runs],
    )
    cells = [Series(tuple(values)).times(100).text(2) for values in percent]
    report.row(name, *cells, both.ratios.text(3))
    return both.ratios.median


def asked(kinds: Mapping[Pod, float], slots: int) -> dict[Pod, float]:
    """Return how frequent each request is where GPUs have so many slots."""
    found: dict[Pod, float] = {}
    for pod, weight in kinds.items():
        request = share_or_whole(slots, pod)
        found[request] = found.get(request, 0) + weight
    return found


def fgd_of(kinds: Mapping[Pod, float]) -> Callable[[Random], Score]:
    fragments = Fragments(kinds)
    return lambda _random: fgd(fragments)


def best_fit_of(machines: Sequence[Machine]) -> Callable[[Random], Score]:
    return lambda _random: best_fit(machines)


if __name__ == "__main__":
    main()
