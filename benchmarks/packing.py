"""How much of a large cluster's GPUs can be given out: our slots against FGD, best fit and random.

Real: :class:`gpuspawner.devices.placement.PlacementIndex`, which chooses the GPUs and the slot on
the node. gpuspawner places on one machine and leaves the choice of the machine to others, such as
Slurm; here best fit stands in for them, the same as in the row "best fit". Tasks come one after
another, never leave, and are lost if they fit nowhere, until they have asked for all GPUs of the
cluster, and then for 130 %, as in the FGD paper (Weng et al., USENIX ATC 2023), whose cluster and
workload these are. ``allocated`` is what the placed tasks asked for, in percent of all GPUs. What
a slot has beyond that is ``too large``: it is held, not allocated. ``free`` is the rest.

With slots a task gets what gpuspawner gives: one slot, if there are slots as large as what it
asks for, or else a whole GPU. ``--slots 2,3,4`` gives the GPUs of a node 2, 3 and 4 slots in turn.
GPUs of the models in ``--unshared`` have none, since a server with several GPUs gets only such.
"several of N" is what leases of several slots of a GPU would do, which gpuspawner does not have.

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
    WHOLE,
    Machine,
    Pod,
    arrivals,
    frequencies,
    published_machines,
    published_pods,
    read_machines,
    read_pods,
)
from support.our_slots import OurChoice, asked, one_slot, several_slots, with_slots
from support.report import Report, Series, argument_parser, pair

ARRIVED = (1.0, 1.3)
SLOTS = ("2", "3", "4", "2,3,4")
SEVERAL = (8, 20)
UNSHARED = ("G3", "V100M32")


@dataclass(frozen=True, slots=True)
class Trial:
    """The cluster and what comes to it."""

    machines: Sequence[Machine]
    kinds: Mapping[Pod, float]
    seed: int

    def fill(
        self,
        score: Callable[[Random], Score],
        *,
        slots: Sequence[Sequence[int]] = (),
        request: Callable[[Pod], Pod] = lambda pod: pod,
        ours: bool = False,
    ) -> list[Filled]:
        """Fill an empty cluster; the same tasks come each time."""
        random = Random(self.seed + 1)
        slots = slots or [(ANY,) * machine.gpus for machine in self.machines]
        nodes = [Node.empty(*each) for each in zip(self.machines, slots, strict=True)]
        return fill(
            Chooser(nodes, score(random), random),
            arrivals(self.kinds, Random(self.seed)),
            arrived=ARRIVED,
            request=request,
            devices=OurChoice(nodes) if ours else None,
        )


def main() -> None:
    parser = argument_parser(__doc__, 3)
    parser.add_argument("--pods", help="CSV of the trace's pods")
    parser.add_argument("--nodes", help="CSV of the trace's nodes with GPUs")
    parser.add_argument("--machines", type=int, default=1, help="only each N-th node (1)")
    parser.add_argument("--slots", nargs="+", default=SLOTS, help="2 3 4 2,3,4")
    parser.add_argument("--several", nargs="*", type=int, default=SEVERAL, help="8 20")
    parser.add_argument("--unshared", nargs="*", default=UNSHARED, help="models without slots")
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
    ratios = []
    for text in args.slots:
        counts = [int(count) for count in text.split(",")]
        slots = with_slots(machines, counts, args.unshared)
        ask = partial(one_slot, WHOLE // min(counts))
        ours = [trial.fill(fit, slots=slots, request=ask, ours=True) for trial in trials]
        ratios.append(add(f"ours, {text} slots", ours))
    for count in args.several:
        ask = partial(several_slots, count)
        for name, score in (("best fit", fit), ("FGD", fgd_of(asked(kinds, ask)))):
            filled = [trial.fill(score, request=ask) for trial in trials]
            add(f"several of {count}, node by {name}", filled)
    # A target is the most that a figure may be, so it is FGD's part of ours.
    report.figure("fgd_to_ours", 1 / max(ratios), most=1.0)
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


def fgd_of(kinds: Mapping[Pod, float]) -> Callable[[Random], Score]:
    fragments = Fragments(kinds)
    return lambda _random: fgd(fragments)


def best_fit_of(machines: Sequence[Machine]) -> Callable[[Random], Score]:
    return lambda _random: best_fit(machines)


if __name__ == "__main__":
    main()
