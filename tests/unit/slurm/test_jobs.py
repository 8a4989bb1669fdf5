"""Jobs as squeue --json and sacct of Slurm 22.05.8 say them, and what is no answer."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuspawner.core.errors import SlurmUnavailable
from gpuspawner.leases.models import LeasedDevice
from gpuspawner.ledger.pricing import Rate, RateCard
from gpuspawner.slurm import jobs
from gpuspawner.slurm.cluster import Cluster, Node, NodeDevice
from gpuspawner.slurm.job_billing import price_of_job
from gpuspawner.slurm.jobs import JobRun, SlurmJob, UsagePart, jobs_of

RUNS: dict[str, Any] = {
    "job_id": 1,
    "name": "gpuspawner-0a1b",
    "user_id": 1005,
    "job_state": "RUNNING",
    "state_reason": "None",
    "nodes": "gpu0a",
    "gres_detail": ["gpu:a100:2(IDX:0-1)"],
    "priority": 25000,
    "submit_time": 1795346531,
    "start_time": 1795346533,
    "end_time": 1795348331,
}
WAITS = RUNS | {"job_state": "PENDING", "state_reason": "Resources"}
WAITS |= {"nodes": "", "gres_detail": [], "start_time": 0}


def job(row: dict[str, Any]) -> SlurmJob:
    (found,) = jobs_of(json.dumps({"errors": [], "jobs": [row]}))
    return found


def at(seconds: int) -> datetime:
    return datetime.fromtimestamp(seconds, timezone.utc)


def test_running_job_is_parsed() -> None:
    found = job(RUNS)
    assert (found.ticket_id, found.node, found.indices) == ("0a1b", "gpu0a", (0, 1))
    assert job(RUNS | {"name": "train.sh"}).ticket_id == ""
    assert found.lives and not found.waits
    assert found.started_at == at(1795346533)
    assert found.ended_at is None, "its end_time is only where its limit is"


def test_waiting_job_is_parsed_with_its_reason() -> None:
    found = job(WAITS)
    assert found.waits and found.lives and not found.indices
    assert found.started_at is None and found.why == ""
    assert job(WAITS | {"state_reason": "Priority"}).why == "other requests go first"
    assert job(WAITS | {"state_reason": "Licenses"}).why == "Slurm says Licenses"
    assert job(WAITS | {"start_time": 1795347732}).started_at == at(1795347732)


@pytest.mark.parametrize(
    ("state", "again", "words"),
    [
        ("CANCELLED", False, "was cancelled"),
        ("TIMEOUT", False, "time limit in Slurm"),
        ("NODE_FAIL", True, "machine was lost"),
        ("PREEMPTED", True, "higher priority"),
        ("COMPLETED", False, "COMPLETED"),
        ("A_NEW_WORD", False, "A_NEW_WORD"),
    ],
)
def test_ended_job_is_parsed_with_its_cause(state: str, again: bool, words: str) -> None:
    found = job(RUNS | {"job_state": state, "gres_detail": []})
    assert not found.lives and found.may_come_again is again
    assert found.ended_at == at(1795348331) and words in found.end
    cleared = job(RUNS | {"job_state": "COMPLETING", "gres_detail": []})
    assert cleared.lives and cleared.ended_at is None and cleared.indices == ()


@pytest.mark.parametrize(
    ("details", "indices"),
    [
        (["gpu:a100:2(IDX:0-1)"], (0, 1)),
        (["gpu:a100:3(IDX:0,2-3)"], (0, 2, 3)),
        (["shard:3(IDX:0)"], (0,)),
        (["shard:a100:1(IDX:1)"], (1,)),
        (["gpu:1(IDX:7)"], (7,)),
        (["gpu:1(IDX:7)", "shard:1(IDX:3)"], ()),
        (["gpu:a100:0(IDX:N/A)"], ()),
        ([], ()),
    ],
)
def test_allocated_devices_are_parsed_from_gres_detail(
    details: list[str], indices: tuple[int, ...]
) -> None:
    assert jobs.given(details) == indices
    found = job(RUNS | {"gres_detail": details})
    assert found.is_share == any("shard" in each for each in details)


@pytest.mark.parametrize(
    ("details", "has_none"),
    [
        (["gpu:a100:0(IDX:)"], True),  # of Slurm 22.05.8, whose controller had just been restarted
        (["shard:0(IDX:N/A)"], True),
        (["gpu:a100:2(IDX:0-1)"], False),
        (["gpu:a100:10(IDX:0-9)"], False),
        ([], False),
    ],
)
def test_job_that_runs_without_a_device_is_recognized(details: list[str], has_none: bool) -> None:
    assert job(RUNS | {"gres_detail": details}).has_none is has_none
    assert not job(RUNS | {"gres_detail": details, "job_state": "COMPLETING"}).has_none


@pytest.mark.parametrize("asked", ["gres:gpu:a100:2", "gres:shard:a100:1", "gres:shard:1"])
def test_job_that_asked_for_a_device_and_has_none_is_recognized(asked: str) -> None:
    """What Slurm 22.05.8 says of a share that it started beside older ones on a full GPU."""
    runs = RUNS | {"gres_detail": [], "tres_per_node": asked}
    assert job(runs).has_none
    assert not job(RUNS | {"gres_detail": [], "tres_per_node": ""}).has_none
    assert not job(runs | {"gres_detail": ["shard:a100:1(IDX:0)"]}).has_none
    assert not job(runs | {"job_state": "COMPLETING"}).has_none


def test_job_that_slurm_cannot_place_is_tried_again() -> None:
    """It ends so when it is submitted, and is held when Slurm was started anew meanwhile."""
    bad = {"state_reason": "BadConstraints"}
    assert job(RUNS | bad | {"job_state": "FAILED", "gres_detail": []}).may_come_again
    assert not job(RUNS | {"job_state": "FAILED", "gres_detail": []}).may_come_again
    assert job(WAITS | bad | {"priority": 0}).is_given_up
    assert job(WAITS | bad).why == "no suitable machine has reported to Slurm yet"
    assert not job(WAITS | bad | {"priority": 1}).is_given_up
    assert not job(WAITS | {"priority": 0}).is_given_up


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("count", [0, 1, 2, 100])
def test_all_jobs_are_parsed_despite_misleading_names(count: int, indent: int | None) -> None:
    """What people write into names is no end of a list."""
    rows = [RUNS | {"job_id": number, "name": '"jobs": [ ]}, {'} for number in range(count)]
    text = json.dumps({"meta": {}, "errors": [], "jobs": rows}, indent=indent)
    assert [each.id for each in jobs_of(text)] == list(range(count))


def test_truncated_slurm_output_is_rejected() -> None:
    text = json.dumps({"errors": [], "jobs": [RUNS, WAITS, RUNS]}, indent=1)
    assert len(jobs_of(text)) == 3
    for most in range(len(text)):
        with pytest.raises(SlurmUnavailable):
            jobs_of(text[:most])


@pytest.mark.parametrize(
    "text",
    [
        *("", "slurm_load_jobs error", "[]", '{"jobs": [{}]}', '{"jobs": null}'),
        '{"errors": [{"error": "no controller"}], "jobs": []}',
    ],
)
def test_invalid_slurm_output_is_rejected(text: str) -> None:
    """An empty list would mean that every server has ended."""
    with pytest.raises(SlurmUnavailable):
        jobs_of(text)


@pytest.mark.parametrize("release", ["21.08.8", "22.05.8", "22.05.11", "23.02.1", "24.11.0-0rc1"])
def test_output_of_an_untested_slurm_version_is_rejected(release: str) -> None:
    text = json.dumps({"meta": {"Slurm": {"release": release}}, "errors": [], "jobs": [RUNS]})
    if release.startswith("22.05."):
        assert [found.id for found in jobs_of(text)] == [1]
        return
    with pytest.raises(SlurmUnavailable, match=f"this is Slurm {release}.*tested with 22.05.8"):
        jobs_of(text)


# What sacct says of usage.


A100, H100, T4 = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "Tesla T4"
GIB = 2**30


def node(name: str, shards: dict[str, int], *devices: tuple[str, str, int]) -> Node:
    return Node(
        name=name,
        address="10.0.0.1",
        engine="unix:///run/docker.sock",
        devices=tuple(
            NodeDevice(name, model, gib * GIB, gres=gres) for model, gres, gib in devices
        ),
        shards=shards,
    )


CLUSTER = Cluster(
    name="lab",
    nodes=(
        node("m1", {"a100": 4}, (A100, "a100", 80), (A100, "a100", 80)),
        node("m2", {"t4": 8}, (H100, "h100", 80), (T4, "t4", 16)),
    ),
)

ROW = (
    *("7", "5_1", "ada", "1795346411", "1795346412", "1795346472", "60"),
    *("billing=1,cpu=1,gres/gpu:h100=1,gres/gpu=1,mem=100M,node=1", "m2", "train.py"),
)


def parse(*rows: tuple[str, ...], delimiter: str = "~x~") -> list[JobRun]:
    return jobs.parse_runs("".join(delimiter.join(row) + "\n" for row in rows), delimiter)


def changed(**cells: str) -> tuple[str, ...]:
    return tuple(cells.get(name, cell) for name, cell in zip(jobs._COLUMNS, ROW, strict=True))


def test_sacct_run_is_parsed() -> None:
    (run,) = parse(ROW)
    start = datetime(2026, 11, 22, 11, 20, 12, tzinfo=timezone.utc)
    assert run == JobRun(
        id="7",
        label="5_1",
        name="train.py",
        user="ada",
        submitted_at=start - timedelta(seconds=1),
        started_at=start,
        ended_at=start + timedelta(minutes=1),
        seconds=60,
        gpus={"h100": 1},
        shards={},
        nodes=("m2",),
    )
    assert run.key == "7:1795346412" and run.uses_devices and not run.ticket_id


def test_running_waiting_and_cancelled_runs_are_parsed() -> None:
    going, waiting, cancelled = parse(
        changed(end="Unknown", jobname="gpuspawner-0af3"),
        changed(start="Unknown", end="Unknown", alloctres="", elapsedraw="0"),
        changed(start="None", alloctres="", nodelist="None assigned"),
    )
    assert going.ended_at is None and going.uses_devices and going.ticket_id == "0af3"
    assert waiting.started_at is None and waiting.seconds == 0 and not waiting.uses_devices
    assert not cancelled.uses_devices and not cancelled.nodes
    assert [run.told for run in (going, waiting)] == [True, False]
    assert jobs.parse_runs("", "~") == [] == jobs.parse_runs("\n", "~")


ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@given(st.lists(ANY_TEXT, min_size=1, max_size=4))
def test_job_name_cannot_forge_a_sacct_row(names: list[str]) -> None:
    forged = [f"{name}\n" + "|".join(ROW) for name in names]
    for some in (names, forged):
        runs = parse(*(changed(jobname=name) for name in some), delimiter="0123456789abcdef")
        assert [run.name for run in runs] == some
        assert {run.id for run in runs} == {"7"}


@pytest.mark.parametrize(
    "cells",
    [
        {"jobidraw": "7.batch"},
        {"submit": "2026-11-22T11:20:11"},
        {"elapsedraw": "1-00:00:00"},
        {"nodelist": "m[1-"},
        None,
    ],
)
def test_malformed_sacct_output_is_rejected(cells: dict[str, str] | None) -> None:
    said = ["7~x~5_1~x~ada", "slurm: a banner"]
    if cells is not None:
        said = ["~x~".join(changed(**cells))]
    for line in said:
        with pytest.raises(SlurmUnavailable, match="sacct did not answer in"):
            jobs.parse_runs(f"{line}\n", "~x~")


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
def test_run_devices_are_parsed_from_tres(
    tres: str, gpus: dict[str, int], shards: dict[str, int]
) -> None:
    (run,) = parse(changed(alloctres=tres))
    assert (run.gpus, run.shards) == (gpus, shards)


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("", ()),
        ("m1", ("m1",)),
        ("m[1-3]", ("m1", "m2", "m3")),
        ("gpu[08-10,12],box,x-[1]", ("gpu08", "gpu09", "gpu10", "gpu12", "box", "x-1")),
        ("m[1-99999999]", None),
        ("m[-]", None),
        ("m[1-2-3]", None),
    ],
)
def test_slurm_node_list_is_expanded_or_rejected(text: str, nodes: tuple[str, ...] | None) -> None:
    if nodes is None:
        with pytest.raises(ValueError, match="m"):
            jobs.hosts(text)
    else:
        assert jobs.hosts(text) == nodes


@pytest.mark.parametrize(
    ("cells", "parts"),
    [
        ({}, (UsagePart(1, (H100,)),)),
        ({"alloctres": "gres/gpu=2", "nodelist": "m1"}, (UsagePart(2, (A100,)),)),
        ({"alloctres": "gres/shard=3", "nodelist": "m1"}, (UsagePart(3, (A100,), 4),)),
        ({"alloctres": "gres/shard=3", "nodelist": "m2"}, (UsagePart(3, (T4,), 8),)),
        ({"alloctres": "gres/shard=1", "nodelist": "lost"}, (UsagePart(1, (T4,), 8),)),
        (
            {"alloctres": "gres/shard:a100=1,gres/shard=1", "nodelist": "lost"},
            (UsagePart(1, (A100,), 4),),
        ),
        ({"alloctres": "gres/shard:h100=1,gres/shard=1"}, (UsagePart(1, (T4,), 8),)),
        ({"alloctres": "gres/gpu=1"}, (UsagePart(1, (H100, T4)),)),
        ({"alloctres": "gres/gpu=1", "nodelist": "lost"}, (UsagePart(1, (A100, H100, T4)),)),
        ({"alloctres": "gres/gpu:new=1,gres/gpu=1"}, (UsagePart(1, (H100, T4)),)),
        ({"alloctres": "cpu=4"}, ()),
    ],
)
def test_run_models_come_from_gres_type_or_node(
    cells: dict[str, str], parts: tuple[UsagePart, ...]
) -> None:
    (run,) = parse(changed(**cells))
    assert jobs.parts_of(run, CLUSTER) == parts


@pytest.mark.parametrize(
    ("rate", "price"),
    [(Rate(amount=1_000_000), 666_667), (Rate(amount=333_334, slots=3), 666_668)],
)
def test_shards_cost_as_much_as_a_session_with_the_same_share(rate: Rate, price: int) -> None:
    """Two of three shards are rounded up once, to the microcredit."""
    card = RateCard((rate,))
    share = LeasedDevice("GPU-1", 0, 0, A100, 80 * 2**30, slots=3, held_slots=2)
    job = price_of_job(card, [UsagePart(2, (A100,), 3)])
    assert job == card.price([share]) == price


class Recorder:
    """A Slurm that always says the same, and what it was asked."""

    def __init__(self, text: str = "") -> None:
        self.text = text
        self.asked: list[tuple[str, ...]] = []

    def run(self, program: str, *words: str) -> str:
        self.asked.append((program, *words))
        return self.text

    def values(self, word: str) -> list[str]:
        return [asked[asked.index(word) + 1] for asked in self.asked]


def recorder(text: str = "") -> Any:
    return Recorder(text)


def test_usage_is_read_in_weeks_without_gaps() -> None:
    slurm, start = recorder(), datetime(2026, 3, 1, tzinfo=timezone.utc)
    assert jobs.read_usage(slurm, start, start + timedelta(days=15, hours=1)) == []
    assert slurm.values("-S") == [f"2026-03-{day:02}T00:00:00" for day in (1, 8, 15)]
    ends = ["2026-03-08T00:00:01", "2026-03-15T00:00:01", "2026-03-16T01:00:01"]
    assert slurm.values("-E") == ends


SDIAG = """\
Server thread count:  3
Agent queue size:     7
Agent count:          0
DBD Agent queue size: {}

Jobs submitted: 12
"""


def test_database_backlog_is_read_from_sdiag() -> None:
    for size in (0, 3, 41_000):
        assert jobs.behind(recorder(SDIAG.format(size))) == size
    for text in ("", SDIAG.format("many"), SDIAG.replace("DBD ", "")):
        with pytest.raises(SlurmUnavailable, match="sdiag does not report the accounting"):
            jobs.behind(recorder(text))


def test_many_holders_are_queried_in_batches() -> None:
    slurm, start = recorder(), datetime(2026, 3, 1, tzinfo=timezone.utc)
    tickets = [f"{number:04}" for number in range(450)]
    assert jobs.read_holders(slurm, tickets, start, start + timedelta(days=99)) == {}
    named = [word for asked in slurm.asked for word in asked if word.startswith("--name=")]
    assert [word.count("gpuspawner-") for word in named] == [200, 200, 50]
