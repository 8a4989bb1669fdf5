"""Who may use the cluster beside the hub, as its scheduler is told.

Real: SQLite, the services. Slurm is asked in one test, where its programs are scripts; tests/slurm
has the real ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuspawner.core.errors import SlurmRefused
from gpuspawner.core.units import MICRO
from gpuspawner.leases.models import Request, ServerRef
from gpuspawner.members.repository import RosterEntry, put_roster
from gpuspawner.queue.models import Ticket
from gpuspawner.services import Services
from gpuspawner.slurm.scheduler import SlurmDelegate
from tests.support.batch_jobs import A100, open_group, wait_in_line
from tests.support.brokers import T0, Clock, open_services


@pytest.fixture
def people(database_url: str, tmp_path: Path) -> Iterator[Services]:
    """Services that know the cluster."""
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "name: lab\nnodes:\n  m1:\n    address: 10.0.0.1\n"
        "    engine: unix:///run/docker.sock\n    cpus: 4\n    memory: 4G\n"
        f"    devices:\n    - {{uuid: GPU-0001, model: {A100}, memory: 80G}}\n"
    )
    services = open_services(
        database_url,
        Clock(),
        cluster=str(file),
        opening_grant=1,
        group_weights={"research": 3},
        group_priority={"course": "course"},
        group_limits={"research": {"devices": 4, "gpu_hours": 10}},
        member_limits={"devices": 1, "tickets": 2},
    )
    for name in ("anna", "bert", "Ann Lee"):
        services.ledger.open_account(name)
    yield services
    services.store.close()


def test_members_map_to_slurm_accounts_by_group(people: Services) -> None:
    with people.store.write() as connection:
        put_roster(connection, [RosterEntry("bert", groups=("research",))], T0)
    people.cluster_members.note_groups({"research": ["anna"], "course": ["anna", "Ann Lee"]})
    people.members.membership_ended("Ann Lee", "it is over", actor="admin")
    found = {each.member: each for each in people.cluster_members.people()}
    assert (found["anna"].group, found["anna"].priority) == ("course", "course")
    assert found["bert"].group == ""  # the hub's word goes before the roster's
    assert found["Ann Lee"].closed and not found["anna"].closed
    asked = people.cluster_members.wanted_of(list(found.values()))
    assert asked.accounts["g-research"].share == 300
    assert (asked.accounts["g-research"].gpus, asked.accounts["g-research"].gpu_minutes) == (4, 600)
    assert asked.users["anna"][2] == "gpuspawner-course"
    assert asked.users["anna"][1].submits == 3
    assert asked.qos["gpuspawner-low"] == 0 < asked.qos["gpuspawner-course"]


def test_roster_groups_apply_until_the_hub_reports_groups(people: Services) -> None:
    with people.store.write() as connection:
        put_roster(connection, [RosterEntry("bert", groups=("research",))], T0)
    assert {each.member: each.group for each in people.cluster_members.people()}[
        "bert"
    ] == "research"


def test_empty_account_blocks_gpus_unless_another_account_pays(people: Services) -> None:
    people.ledger.grant("member:anna", -MICRO, actor="admin", reason="gone")
    people.ledger.grant("member:bert", -MICRO, actor="admin", reason="gone")

    def dry() -> set[str]:
        return {each.member for each in people.cluster_members.people() if each.dry}

    assert dry() == {"anna", "bert"}
    open_group(people, "research")
    people.ledger.grant("group:research", MICRO, actor="admin", reason="start")
    people.cluster_members.note_groups({"research": ["anna"]})
    people.ledger.keep_payer("anna", "group:research", actor="anna", groups=["research"])
    wait_in_line(people, "aa", "bert")  # for a server whose payer was looked at
    assert dry() == set()
    people.cluster_members.note_groups({"research": []})
    assert dry() == {"anna"}
    people.prices.set_rate("0", actor="admin")
    assert dry() == set()


@pytest.mark.parametrize(
    ("database", "sentence"),
    [
        (
            "Problem talking to the database: Connection refused",
            "Slurm has not registered zoe yet, because its database is slow just now. Try again in "
            "a minute.",
        ),
        (
            "Access/permission denied",
            "Slurm rejected the request: the user zoe has no account there. Ask your admin to "
            "create it with gpuspawner slurm sync.",
        ),
    ],
)
def test_newcomer_whom_slurm_does_not_know_yet_is_told_to_try_again(
    people: Services,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    database: str,
    sentence: str,
) -> None:
    """An admin is only called for what lasts."""
    refused = "Batch job submission failed: Invalid account or account/partition combination"
    for program, said in (("sacctmgr", database), ("sbatch", refused)):
        script = tmp_path / program
        script.write_text(f"#!/bin/sh\necho '{program}: error: {said}' >&2; exit 1\n")
        script.chmod(0o755)
    for program, said in (("squeue", '{"jobs": []}'), ("sinfo", ""), ("scontrol", "")):
        (tmp_path / program).write_text(f"#!/bin/sh\necho '{said}'\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    delegate = people.delegation.delegate
    assert isinstance(delegate, SlurmDelegate)
    ticket = Ticket(id="aa", server=ServerRef("zoe"), request=Request(devices=1), created_at=T0)
    with pytest.raises(SlurmRefused) as told:
        delegate.submit(ticket)
    assert told.value.message == sentence
