"""What squeue --json says, as Slurm 22.05.8 said it, and what must not be taken for an answer."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import Any

import pytest

from gpuspawner.core.errors import SlurmUnavailable
from gpuspawner.slurm.jobs import SlurmJob, given, jobs_of

RUNS: dict[str, Any] = {
    "job_id": 1,
    "name": "gpuspawner-0a1b",
    "user_name": "ann",
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
WAITS = RUNS | {
    "job_state": "PENDING",
    "state_reason": "Resources",
    "nodes": "",
    "gres_detail": [],
    "start_time": 0,
}


def job(row: dict[str, Any]) -> SlurmJob:
    (found,) = jobs_of(json.dumps({"errors": [], "jobs": [row]}))
    return found


def at(seconds: int) -> datetime:
    return datetime.fromtimestamp(seconds, timezone.utc)


def test_a_job_that_runs() -> None:
    found = job(RUNS)
    assert (found.ticket_id, found.node, found.kind, found.indices) == (
        "0a1b",
        "gpu0a",
        "gpu",
        (0, 1),
    )
    assert found.lives and not found.waits
    assert found.started_at == at(1795346533)
    assert found.ended_at is None, "its end_time is only where its limit is"


def test_a_job_that_waits() -> None:
    found = job(WAITS)
    assert found.waits and found.lives and not found.indices
    assert found.started_at is None and found.why == ""
    assert job(WAITS | {"state_reason": "Priority"}).why == "others go first"
    assert job(WAITS | {"state_reason": "Licenses"}).why == "Slurm says Licenses"
    assert job(WAITS | {"start_time": 1795347732}).started_at == at(1795347732)


@pytest.mark.parametrize(
    ("state", "again", "words"),
    [
        ("CANCELLED", False, "was cancelled"),
        ("TIMEOUT", False, "time in Slurm was over"),
        ("NODE_FAIL", True, "machine was lost"),
        ("PREEMPTED", True, "somebody who goes first"),
        ("COMPLETED", False, "COMPLETED"),
        ("A_NEW_WORD", False, "A_NEW_WORD"),
    ],
)
def test_a_job_that_has_ended(state: str, again: bool, words: str) -> None:
    found = job(RUNS | {"job_state": state, "gres_detail": []})
    assert not found.lives and found.may_come_again is again
    assert found.ended_at == at(1795348331) and words in found.end


def test_one_that_is_being_cleared_away_is_not_gone() -> None:
    found = job(RUNS | {"job_state": "COMPLETING", "gres_detail": []})
    assert found.lives and found.ended_at is None and found.indices == ()


@pytest.mark.parametrize(
    ("details", "kind", "indices"),
    [
        (["gpu:a100:2(IDX:0-1)"], "gpu", (0, 1)),
        (["gpu:a100:3(IDX:0,2-3)"], "gpu", (0, 2, 3)),
        (["shard:3(IDX:0)"], "shard", (0,)),
        (["shard:a100:1(IDX:1)"], "shard", (1,)),
        (["gpu:1(IDX:7)"], "gpu", (7,)),
        (["gpu:a100:0(IDX:N/A)"], "", ()),
        ([], "", ()),
    ],
)
def test_which_devices(details: list[str], kind: str, indices: tuple[int, ...]) -> None:
    assert given(details) == (kind, indices)


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("count", [0, 1, 2, 100])
def test_as_many_as_there_are(count: int, indent: int | None) -> None:
    """What people write into names is no end of a list."""
    rows = [RUNS | {"job_id": number, "name": '"jobs": [ ]}, {'} for number in range(count)]
    text = json.dumps({"meta": {}, "errors": [], "jobs": rows}, indent=indent)
    assert [each.id for each in jobs_of(text)] == list(range(count))


def test_an_answer_that_is_cut_off_anywhere_is_none() -> None:
    text = json.dumps({"errors": [], "jobs": [RUNS, WAITS, RUNS]}, indent=1)
    assert len(jobs_of(text)) == 3
    for most in range(len(text)):
        with pytest.raises(SlurmUnavailable):
            jobs_of(text[:most])


def test_jobs_of_others_hold_no_ticket() -> None:
    assert job(RUNS | {"name": "train.sh"}).ticket_id == ""


@pytest.mark.parametrize(
    "text",
    [
        "",
        "slurm_load_jobs error",
        "[]",
        '{"jobs": [{}]}',
        '{"jobs": null}',
        '{"errors": [{"error": "no controller"}], "jobs": []}',
    ],
)
def test_half_an_answer_is_no_answer(text: str) -> None:
    """An empty list would mean that every server has ended."""
    with pytest.raises(SlurmUnavailable):
        jobs_of(text)


@pytest.mark.parametrize("release", ["21.08.8", "22.05.8", "22.05.11", "23.02.1", "24.11.0-0rc1"])
def test_another_slurm_is_named_and_not_believed(release: str) -> None:
    text = json.dumps({"meta": {"Slurm": {"release": release}}, "errors": [], "jobs": [RUNS]})
    if release.startswith("22.05."):
        assert [found.id for found in jobs_of(text)] == [1]
        return
    with pytest.raises(SlurmUnavailable, match=f"it is Slurm {release}.*tried with 22.05.8"):
        jobs_of(text)
