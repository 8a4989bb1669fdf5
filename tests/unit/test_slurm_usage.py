"""What sacct prints, read to the second. The text is as Slurm 22.05.8 prints it."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuspawner.core.errors import SlurmUnavailable
from gpuspawner.slurm import jobs
from gpuspawner.slurm.cluster import Cluster, Node, NodeDevice
from gpuspawner.slurm.jobs import JobRun, UsagePart

A100, H100, T4 = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "Tesla T4"
GIB = 2**30

CLUSTER = Cluster(
    name="lab",
    shards=4,
    nodes=(
        Node(
            name="m1",
            address="10.0.0.1",
            engine="unix:///run/docker.sock",
            devices=(NodeDevice("GPU-1", A100, 80 * GIB, gres="a100"),) * 2,
        ),
        Node(
            name="m2",
            address="10.0.0.2",
            engine="unix:///run/docker.sock",
            devices=(
                NodeDevice("GPU-3", H100, 80 * GIB, gres="h100"),
                NodeDevice("GPU-4", T4, 16 * GIB, gres="t4"),
            ),
        ),
    ),
)

ROW = (
    *("7", "5_1", "ada", "g-research", "COMPLETED", "1795346411", "1795346412", "1795346472", "60"),
    *("billing=1,cpu=1,gres/gpu:h100=1,gres/gpu=1,mem=100M,node=1", "m2", "0:0", "train.py"),
)


def parse(*rows: tuple[str, ...], delimiter: str = "~x~") -> list[JobRun]:
    return jobs.parse_runs("".join(delimiter.join(row) + "\n" for row in rows), delimiter)


def changed(**cells: str) -> tuple[str, ...]:
    return tuple(cells.get(name, cell) for name, cell in zip(jobs._COLUMNS, ROW, strict=True))


def test_a_run() -> None:
    (run,) = parse(ROW)
    start = datetime(2026, 11, 22, 11, 20, 12, tzinfo=timezone.utc)
    assert run == JobRun(
        id="7",
        label="5_1",
        name="train.py",
        user="ada",
        account="g-research",
        state="COMPLETED",
        submitted_at=start - timedelta(seconds=1),
        started_at=start,
        ended_at=start + timedelta(minutes=1),
        seconds=60,
        gpus={"h100": 1},
        shards={},
        nodes=("m2",),
        exit="0:0",
    )
    assert run.key == "7:1795346412" and run.uses_devices and not run.ticket_id


def test_nothing_is_no_run() -> None:
    assert jobs.parse_runs("", "~") == [] == jobs.parse_runs("\n", "~")


def test_a_run_that_goes_on_and_a_job_that_waits() -> None:
    going, waiting, cancelled = parse(
        changed(state="RUNNING", end="Unknown"),
        changed(state="PENDING", start="Unknown", end="Unknown", alloctres="", elapsedraw="0"),
        changed(state="CANCELLED by 1004", start="None", alloctres="", nodelist="None assigned"),
    )
    assert going.ended_at is None and going.uses_devices
    assert waiting.started_at is None and waiting.seconds == 0 and not waiting.uses_devices
    assert cancelled.state == "CANCELLED" and not cancelled.uses_devices and not cancelled.nodes


def test_a_holder_names_its_ticket() -> None:
    (run,) = parse(changed(jobname="gpuspawner-0af3"))
    assert run.ticket_id == "0af3"


ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@given(st.lists(ANY_TEXT, min_size=1, max_size=4))
def test_a_job_may_have_any_name_and_no_name_is_a_row(names: list[str]) -> None:
    forged = [f"{name}\n" + "|".join(ROW) for name in names]
    for some in (names, forged):
        runs = parse(*(changed(jobname=name) for name in some), delimiter="0123456789abcdef")
        assert [run.name for run in runs] == some
        assert {run.id for run in runs} == {"7"}


@pytest.mark.parametrize(
    "said",
    [
        "7~x~5_1~x~ada\n",
        "~x~".join(changed(jobidraw="7.batch")) + "\n",
        "~x~".join(changed(submit="2026-11-22T11:20:11")) + "\n",
        "~x~".join(changed(elapsedraw="1-00:00:00")) + "\n",
        "~x~".join(changed(nodelist="m[1-")) + "\n",
        "slurm: a banner\n",
    ],
)
def test_what_sacct_never_prints_is_refused(said: str) -> None:
    with pytest.raises(SlurmUnavailable, match="sacct did not answer"):
        jobs.parse_runs(said, "~x~")


@pytest.mark.parametrize(
    ("tres", "gpus", "shards"),
    [
        ("billing=1,cpu=1,mem=100M,node=1", {}, {}),
        ("gres/gpu=2", {"": 2}, {}),
        ("gres/gpu:a100=1,gres/gpu:h100=1,gres/gpu=2", {"a100": 1, "h100": 1}, {}),
        ("gres/gpu:a100=1,gres/gpu=3", {"a100": 1, "": 2}, {}),
        ("gres/shard=3", {}, {"": 3}),
        ("gres/shard:a100=3,gres/shard=3,gres/tpu=9", {}, {"a100": 3}),
    ],
)
def test_devices(tres: str, gpus: dict[str, int], shards: dict[str, int]) -> None:
    (run,) = parse(changed(alloctres=tres))
    assert (run.gpus, run.shards) == (gpus, shards)


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("", ()),
        ("m1", ("m1",)),
        ("m[1-3]", ("m1", "m2", "m3")),
        ("gpu[08-10,12],box,x-[1]", ("gpu08", "gpu09", "gpu10", "gpu12", "box", "x-1")),
    ],
)
def test_nodes(text: str, nodes: tuple[str, ...]) -> None:
    assert jobs.hosts(text) == nodes


@pytest.mark.parametrize("text", ["m[1-99999999]", "m[-]", "m[1-2-3]"])
def test_no_nodes(text: str) -> None:
    with pytest.raises(ValueError, match="m"):
        jobs.hosts(text)


@pytest.mark.parametrize(
    ("cells", "parts"),
    [
        ({}, (UsagePart(1, (H100,)),)),
        ({"alloctres": "gres/gpu=2", "nodelist": "m1"}, (UsagePart(2, (A100,)),)),
        ({"alloctres": "gres/shard=3", "nodelist": "m1"}, (UsagePart(3, (A100,), 4),)),
        ({"alloctres": "gres/gpu=1"}, (UsagePart(1, (H100, T4)),)),
        ({"alloctres": "gres/gpu=1", "nodelist": "lost"}, (UsagePart(1, (A100, H100, T4)),)),
        ({"alloctres": "gres/gpu:new=1,gres/gpu=1"}, (UsagePart(1, (H100, T4)),)),
        ({"alloctres": "cpu=4"}, ()),
    ],
)
def test_devices_are_known_by_their_type_or_else_by_their_node(
    cells: dict[str, str], parts: tuple[UsagePart, ...]
) -> None:
    (run,) = parse(changed(**cells))
    assert jobs.parts_of(run, CLUSTER) == parts


class Recorder:
    """A Slurm that says nothing, and what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []

    def run(self, program: str, *words: str) -> str:
        self.asked.append((program, *words))
        return ""

    def values(self, word: str) -> list[str]:
        return [asked[asked.index(word) + 1] for asked in self.asked]


def test_a_long_time_is_asked_for_in_weeks_without_a_gap() -> None:
    slurm, start = Recorder(), datetime(2026, 3, 1, tzinfo=timezone.utc)
    assert jobs.read_usage(slurm, start, start + timedelta(days=15, hours=1)) == []
    assert slurm.values("-S") == [f"2026-03-{day:02}T00:00:00" for day in (1, 8, 15)]
    ends = ["2026-03-08T00:00:01", "2026-03-15T00:00:01", "2026-03-16T01:00:01"]
    assert slurm.values("-E") == ends


class Said(Recorder):
    """A Slurm that always says this."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def run(self, program: str, *words: str) -> str:
        return self.text


SDIAG = """\
Server thread count:  3
Agent queue size:     7
Agent count:          0
DBD Agent queue size: {}

Jobs submitted: 12
"""


def test_how_far_the_database_is_behind() -> None:
    for size in (0, 3, 41_000):
        assert jobs.behind(Said(SDIAG.format(size))) == size
    for text in ("", SDIAG.format("many"), SDIAG.replace("DBD ", "")):
        with pytest.raises(SlurmUnavailable, match="sdiag does not say how far"):
            jobs.behind(Said(text))


def test_what_a_job_had_may_not_be_told_yet() -> None:
    assert [run.told for run in parse(ROW, changed(alloctres=""))] == [True, False]


def test_many_holders_are_asked_for_by_name_some_at_once() -> None:
    slurm, start = Recorder(), datetime(2026, 3, 1, tzinfo=timezone.utc)
    tickets = [f"{number:04}" for number in range(450)]
    assert jobs.read_holders(slurm, tickets, start, start + timedelta(days=99)) == {}
    named = [word for asked in slurm.asked for word in asked if word.startswith("--name=")]
    assert [word.count("gpuspawner-") for word in named] == [200, 200, 50]
