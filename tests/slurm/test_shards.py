"""Whole GPUs and shares of GPUs at the same time. Real: a Slurm of two nodes on the files that
``gpuspawner slurm config`` wrote, with its database, services and their store. Stand-in: the GPUs.

The first node has an A100 of four shards and an H100 that is not shared, the second another H100.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timedelta
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gpuspawner.cli.check_slurm import _check_node, node_states
from gpuspawner.core.errors import TooMuchAsked
from gpuspawner.core.units import MICRO
from gpuspawner.engines.base import LABEL_LEASE
from gpuspawner.engines.preflight import Status
from gpuspawner.leases.models import Lease, Request, ServerRef, Sharing, Terms
from gpuspawner.queue.models import Ticket
from gpuspawner.services import Services
from gpuspawner.slurm import accounts
from gpuspawner.slurm.cluster import Cluster
from gpuspawner.slurm.jobs import read_holders
from gpuspawner.slurm.programs import Slurm
from gpuspawner.slurm.scheduler import SHARED_STILL
from tests.support.brokers import problems
from tests.support.configured_cluster import ConfiguredCluster
from tests.support.images import INSTANT
from tests.support.processes import wait_for
from tests.support.slurm_broker import asked, opened, until
from tests.support.slurm_hub import SlurmHub

MEMBERS = tuple(f"share{number}" for number in range(6))
ROOMY = """  - slug: roomy
    display_name: Roomy
    image: {instant}
    sharing: any
    devices: {{default: 1, max: 8}}
    mem_guarantee: 96M
    mem_limit: 160M
    cpu_guarantee: 1.5
"""
RATES = {"A100": 3600, "H100": 7200}
"""Credits an hour."""


@pytest.fixture(scope="module")
def configured(clusters: None) -> Iterator[ConfiguredCluster]:
    with ConfiguredCluster("A100=4") as cluster:
        for name in MEMBERS:
            cluster.users.make(name)
        yield cluster


@pytest.fixture
def cluster(configured: ConfiguredCluster) -> Iterator[ConfiguredCluster]:
    yield configured
    configured.clean()


@pytest.fixture
def described(cluster: ConfiguredCluster) -> Cluster:
    """As a hub reads it; its Slurm is not in the usual place."""
    return replace(cluster.described(), slurm_conf=str(cluster.conf))


@pytest.fixture
def services(cluster: ConfiguredCluster, described: Cluster, tmp_path: Path) -> Iterator[Services]:
    services = opened(tmp_path, cluster, nodes=described, gpu_rates=RATES, opening_grant=100_000)
    with closing(services.store):
        yield services


def start(services: Services, *tickets: Ticket) -> list[Lease]:
    """Their leases, in this order."""
    wanted = {ticket.id for ticket in tickets}
    until(services, list(tickets), lambda turns: wanted <= set(turns))
    return [services.queue.start_ticket(ticket.id) for ticket in tickets]


def end(services: Services, *leases: Lease) -> None:
    delegate = services.delegation.delegate
    assert delegate is not None

    def ended_at(lease: Lease) -> datetime | None:
        return delegate.turns()[str(lease.ticket_id)].ended_at

    for lease in leases:
        delegate.cancel(str(lease.ticket_id))
    for lease in leases:
        end = wait_for(partial(ended_at, lease), "the end of its job")
        services.leases.release(lease.id, ended_at=end, reason="stopped")


def held(lease: Lease) -> tuple[str, int | Fraction, int]:
    """The model, how much of it, and the price in credits an hour."""
    (device,) = lease.devices
    return device.model.split()[1], lease.device_equivalents, lease.rate // MICRO


def test_whole_devices_and_shares_are_leased_at_the_same_time(services: Services) -> None:
    """Shares are of the A100 alone. Who wants it whole waits until nobody has a share of it."""
    a100, quarter = "A100-SXM4-40GB", Fraction(1, 4)
    shares = [asked(services, name, sharing=Sharing.SLOT) for name in MEMBERS[:3]]
    first, second, third = start(services, *shares)
    assert [held(lease) for lease in (first, second, third)] == [(a100, quarter, 900)] * 3
    assert {device.slot for lease in (first, second, third) for device in lease.devices} == {
        0, 1, 2,
    }  # fmt: skip

    (whole,) = start(services, asked(services, MEMBERS[3], model="H100"))
    assert held(whole) == ("H100", 1, 7200) and not whole.devices[0].is_shared
    waits = asked(services, MEMBERS[4], model="A100")
    (share,) = services.monitoring.overview().shares
    assert (share.label, share.free) == ("1/4 of NVIDIA A100-SXM4-40GB, about 10 GB", 1)

    end(services, first, second, third)
    (alone,) = start(services, waits)
    assert held(alone) == (a100, 1, 3600)
    assert (alone.devices[0].held_slots, alone.devices[0].is_shared) == (4, False)
    late = asked(services, MEMBERS[5], sharing=Sharing.SLOT)
    assert late.id not in services.queue.turns(frozenset({late.id}))
    end(services, alone)
    start(services, late)
    assert problems(services.store) == []


def test_share_of_several_shards_is_what_slurm_allocated(
    services: Services, cluster: ConfiguredCluster
) -> None:
    """15 GB are two of the A100's four shards. Another program has one, so a second such share
    waits for it."""
    cluster.user(MEMBERS[2])
    other = cluster.hold(MEMBERS[2], "--gres=shard:1")
    cluster.wait_state(other, "RUNNING")
    half = partial(asked, services, sharing=Sharing.SLOT, memory_bytes=15 * 2**30)
    tickets = [half(name) for name in MEMBERS[:2]]
    (turn,) = until(services, tickets, lambda turns: turns)
    waits = "PENDING Resources gres:shard:2"
    (second,) = (ticket for ticket in tickets if ticket.id != turn)
    wait_for(lambda: cluster.holder(second.id, "%T %r %b") == waits, "Slurm to look at it")

    leases = [services.queue.start_ticket(turn)]
    cluster.run("scancel", str(other))
    leases += start(services, second)
    assert [held(lease) for lease in leases] == [("A100-SXM4-40GB", Fraction(1, 2), 1800)] * 2
    assert [(d.slot, d.held_slots) for lease in leases for d in lease.devices] == [(0, 2), (2, 2)]
    assert [cluster.holder(lease.ticket_id, "%b") for lease in leases] == ["gres:shard:2"] * 2
    overview = services.monitoring.overview()
    assert (overview.shares[0].free, problems(services.store)) == (0, [])

    end(services, *leases)
    # Their ends are Slurm's, in whole seconds, which may be before a grant in the same second.
    since = min(lease.granted_at for lease in leases) - timedelta(seconds=1)

    def compared() -> Any:
        """Slurm's database knows of their ends, and of their shards, a little later."""
        until_now = services.clock() + timedelta(seconds=1)
        names = {str(lease.ticket_id) for lease in leases}
        slurm = services.cluster_members.slurm()
        runs = read_holders(slurm, names, since - timedelta(hours=1), until_now)
        told = [sum(run.shards.values()) for some in runs.values() for run in some if run.ended_at]
        return told == [2, 2] and services.cluster_audit.audit_cluster(since, until_now)

    assert wait_for(compared, "Slurm's database", interval=0.5) == (2, [])


@pytest.mark.parametrize("left", ["server", "batch job"])
def test_whole_gpu_that_slurm_gives_too_early_waits_for_the_last_share(
    services: Services, cluster: ConfiguredCluster, left: str
) -> None:
    """Slurm 22.05 takes a GPU for free when the first of its shares ends."""
    (first,) = start(services, asked(services, MEMBERS[0], sharing=Sharing.SLOT))
    if left == "server":
        (second,) = start(services, asked(services, MEMBERS[1], sharing=Sharing.SLOT))
    else:
        job = cluster.hold(cluster.user(MEMBERS[1]), "--gres=shard:1")
        cluster.wait_state(job, "RUNNING")
    whole = asked(services, MEMBERS[2], model="A100")
    wait_for(lambda: cluster.holder(whole.id, "%T %r") == "PENDING Resources", "its job")
    end(services, first)
    delegate = services.delegation.delegate
    assert delegate is not None
    wait_for(lambda: delegate.turns()[whole.id].why == SHARED_STILL, "Slurm to give it")
    assert cluster.holder(whole.id) == "RUNNING"
    assert services.queue.turns(frozenset({whole.id})) == []

    if left == "server":
        end(services, second)
    else:
        cluster.run("scancel", str(job))
    (lease,) = start(services, whole)
    assert held(lease) == ("A100-SXM4-40GB", 1, 3600)
    assert problems(services.store) == []
    end(services, lease)


def test_check_compares_shards_with_slurm(cluster: ConfiguredCluster, described: Cluster) -> None:
    states = node_states(Slurm(conf=str(cluster.conf)))
    first, second = described.nodes
    assert [states[node.name].shards for node in (first, second)] == [4, 0]
    assert _check_node(first, states[first.name]).text.endswith("1 a100, 1 h100, 4 shards")
    outdated = replace(first, shards={"a100": 2})
    told = _check_node(outdated, states[first.name])
    assert told.status is Status.FAIL
    assert "counts 1 a100, 1 h100, 4 shards, and cluster.yaml 1 a100, 1 h100, 2 sh" in told.text


def test_share_of_a_model_that_is_not_shared_is_rejected(services: Services) -> None:
    request = Request(devices=1, model="H100", sharing=Sharing.SLOT)
    with pytest.raises(TooMuchAsked, match=r"No H100 GPU is shared on this hub\. Shared are"):
        services.queue.ask(ServerRef(MEMBERS[0]), request, engine="slurm", terms=Terms(wait=True))
    assert services.queue.waiting() == []


def test_limit_counts_devices_and_shares_together(
    cluster: ConfiguredCluster, described: Cluster, tmp_path: Path
) -> None:
    """A limit of one GPU: four shares, or one whole GPU, of the member's servers and jobs."""
    limits = {"devices": 1, "gpu_hours": 1000}
    services = opened(tmp_path, cluster, nodes=described, member_limits=limits)
    with closing(services.store):
        for name in MEMBERS:
            services.ledger.open_account(name)
        plan = services.cluster_members.plan_for_cluster()
        accounts.apply_plan(services.cluster_members.slurm(), plan.steps)
        assert services.cluster_members.plan_for_cluster().steps == ()
    user = MEMBERS[0]
    words = ("--account=gpuspawner-members", "--time=60")
    shares = [cluster.hold(user, "--gres=shard:1", *words) for _ in range(3)]
    for job in shares:
        cluster.wait_state(job, "RUNNING")
    whole = cluster.hold(user, "--gres=gpu:h100:1", *words)
    fourth = cluster.hold(user, "--gres=shard:a100:1", "--nice=-100", *words)
    cluster.wait_state(fourth, "RUNNING")
    reason = ("squeue", "-h", "-j", str(whole), "-o", "%r")
    wait_for(lambda: cluster.run(*reason).strip() == "AssocGrpBilling", "the reason")
    cluster.run("scancel", *map(str, (*shares, fourth)))
    cluster.wait_state(whole, "RUNNING")


def test_share_is_started_with_the_memory_and_cpus_of_its_environment(
    hubs: None, cluster: ConfiguredCluster, described: Cluster, tmp_path: Path
) -> None:
    """The container is in the job's cgroup, so the job has as much as the container may use."""
    environments = ROOMY.format(instant=INSTANT)
    with SlurmHub(tmp_path / "hub", cluster, nodes=described, environments=environments) as hub:
        share = hub.begin(MEMBERS[0], environment="roomy", gpus="share")
        whole = hub.begin(MEMBERS[1], environment="instant", gpus=1)
        assert (share.device_equivalents, whole.device_equivalents) == (Fraction(1, 4), 1)
        assert share.devices[0].model != whole.devices[0].model
        assert cluster.holder(share.ticket_id, "%b %C %m") == "gres:shard:1 2 160M"
        (container,) = (
            each
            for each in hub.containers(hub.node_of(share))
            if each["Labels"][LABEL_LEASE] == share.id
        )
        client = hub.node_of(share).engine.client
        assert client.inspect_container(container["Id"])["HostConfig"]["Memory"] == 160 * 2**20
        assert hub.get(MEMBERS[0], "devices").text.split() == ["/dev/nvidia0"]
        # Without amounts of its own, an environment gets an equal part for each GPU.
        cpus, megabytes = described.nodes[1].cpus, described.nodes[1].memory_bytes / 2**20
        held = {f"gres:gpu:1 {cpus // n} {int(megabytes * 0.9 / n)}M" for n in (1, 2)}
        assert cluster.holder(whole.ticket_id, "%b %C %m") in held
        hub.stop_servers(MEMBERS[0], MEMBERS[1])
