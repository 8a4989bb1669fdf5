"""The job that holds a ticket's devices, as the words of sbatch. Pure."""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuspawner.core.errors import TooMuchAsked
from gpuspawner.devices.suitability import suitable
from gpuspawner.leases.models import Request, ServerRef, Sharing
from gpuspawner.queue.models import Ticket
from gpuspawner.slurm.cluster import Cluster, Node, NodeDevice
from gpuspawner.slurm.job_spec import JobResources, able, devices_of, of, resources_of
from gpuspawner.slurm.programs import minutes_of, words

GIB = 2**30


def node(name: str, *models: tuple[str, str, int]) -> Node:
    devices = tuple(
        NodeDevice(f"GPU-{name}-{n}", model, gib * GIB, gres=gres)
        for n, (model, gres, gib) in enumerate(models)
    )
    return Node(
        name=name,
        address="10.0.0.1",
        engine="unix:///run/docker.sock",
        devices=devices,
        cpus=16,
        memory_bytes=64 * GIB,
    )


A100 = ("NVIDIA A100-SXM4-40GB", "a100", 40)
H100 = ("NVIDIA H100 80GB HBM3", "h100", 80)
T4 = ("Tesla T4", "t4", 15)
CLUSTER = Cluster(
    name="lab", nodes=(node("one", A100, A100), node("two", H100), node("three", T4, H100))
)
TICKET = Ticket(
    id="0a1b",
    server=ServerRef("ann", "my; server"),
    request=Request(devices=1),
    created_at=datetime(2026, 1, 1, tzinfo=timezone.utc),
)


def asked(cluster: Cluster = CLUSTER, **request: Any) -> list[str]:
    given: dict[str, Any] = {"devices": 1, **request}
    return words(of(replace(TICKET, request=Request(**given)), cluster))


def value(told: list[str], name: str) -> str:
    return "".join(word.removeprefix(name) for word in told if word.startswith(name))


def gres(told: list[str]) -> str:
    return value(told, "--gres=")


def without(told: list[str]) -> str:
    return value(told, "--exclude=")


def test_plain_job_spec_has_name_comment_and_no_limits() -> None:
    told = asked()
    assert "--job-name=gpuspawner-0a1b" in told and "--no-requeue" in told
    assert json.loads(value(told, "--comment=")) == {
        "server": "ann/my; server",
        "kind": "server",
    }
    assert not any(word.startswith(("--time=", "--uid=", "--nice")) for word in told)


@pytest.mark.parametrize(
    ("request_", "wanted", "not_on"),
    [
        ({"model": "A100", "devices": 2}, "gpu:a100:2", ""),
        ({"model": "h100"}, "gpu:h100:1", ""),
        ({"memory_bytes": 80 * GIB}, "gpu:h100:1", ""),
        # The third has one that would do, and Slurm might give the other.
        ({"memory_bytes": 40 * GIB}, "gpu:1", "three"),
        ({"models": ("A100", "H100")}, "gpu:1", "three"),
        ({"models": ("A100", "T4"), "devices": 2}, "gpu:2", "three,two"),
        ({"devices": 2}, "gpu:2", "three"),
        ({"models": ("T4", "H100")}, "gpu:1", "one"),
        ({}, "gpu:1", ""),
    ],
)
def test_job_spec_selects_only_suitable_devices(
    request_: dict[str, Any], wanted: str, not_on: str
) -> None:
    told = asked(**request_)
    assert (gres(told), without(told)) == (wanted, not_on)


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        ({"devices": 3}, "no machine has more than 2. Ask for 2 at most."),
        ({"devices": 2, "model": "H100"}, "no machine has more than 1. Ask for 1 at most."),
        ({"devices": 2, "models": ("T4", "H100")}, "no machine has more than 1. Ask for 1 at"),
        ({"model": "B200"}, "No machine has GPUs of model B200. Choose another."),
    ],
)
def test_request_that_no_node_can_meet_is_rejected(request_: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TooMuchAsked, match=sentence):
        asked(**request_)


def test_job_gets_a_node_share_per_gpu_or_shard() -> None:
    told = asked(model="A100", devices=1)
    assert "--cpus-per-task=8" in told and f"--mem={int(64 * 1024 * 0.9 / 2)}M" in told
    assert "--cpus-per-task=16" in asked(model="A100", devices=2)

    told = asked(SHARED, model="A100", sharing=Sharing.SLOT)
    assert "--cpus-per-task=2" in told and f"--mem={int(64 * 1024 * 0.9 / 8)}M" in told
    told = asked(SHARED, sharing=Sharing.SLOT, memory_bytes=30 * GIB)
    assert "--cpus-per-task=6" in told and f"--mem={int(64 * 1024 * 0.9 * 3 / 8)}M" in told
    assert "--cpus-per-task=8" in asked(SHARED, model="A100")


SHARED = replace(
    CLUSTER,
    nodes=(
        replace(CLUSTER.nodes[0], shards={"a100": 4}),
        CLUSTER.nodes[1],
        replace(CLUSTER.nodes[2], shards={"t4": 2}),
    ),
)
"""The A100s and the T4 are shared, and no H100 is, not even the one beside the T4."""


@pytest.mark.parametrize(
    ("request_", "wanted", "not_on"),
    [
        ({}, "shard:1", ""),
        ({"model": "A100"}, "shard:a100:1", ""),
        ({"models": ("T4", "H100")}, "shard:t4:1", ""),
        # A quarter of an A100 has 10 GB, and half of a T4 has 7.
        ({"memory_bytes": 7 * GIB}, "shard:1", ""),
        ({"memory_bytes": 8 * GIB}, "shard:a100:1", ""),
        ({"memory_bytes": 11 * GIB}, "shard:a100:2", ""),
        ({"memory_bytes": 30 * GIB}, "shard:a100:3", ""),
    ],
)
def test_share_is_asked_for_where_devices_are_shared(
    request_: dict[str, Any], wanted: str, not_on: str
) -> None:
    told = asked(SHARED, sharing=Sharing.SLOT, **request_)
    assert (gres(told), without(told)) == (wanted, not_on)


UNEVEN = replace(
    CLUSTER,
    nodes=(
        SHARED.nodes[0],
        replace(node("two", H100), shards={"h100": 4}),
        replace(node("four", A100), shards={"a100": 3}),
        replace(node("five", H100, A100), shards={"h100": 4, "a100": 4}),
    ),
)
"""Three A100s are in quarters and one is in thirds; two H100s are in quarters."""


@pytest.mark.parametrize(
    ("request_", "wanted", "not_on"),
    [
        # Of A100s, two quarters or two thirds.
        ({"memory_bytes": 15 * GIB, "model": "A100"}, "shard:a100:2", ""),
        # A quarter of an H100 would do, but there are fewer of them.
        ({"memory_bytes": 15 * GIB}, "shard:a100:2", ""),
        ({"memory_bytes": 12 * GIB, "model": "A100"}, "shard:a100:2", "four"),
        ({"memory_bytes": 29 * GIB}, "shard:a100:3", "four"),
        # Two quarters of an H100 would do, too.
        ({"memory_bytes": 27 * GIB, "models": ("A100", "H100")}, "shard:a100:3", "four"),
        ({"memory_bytes": 31 * GIB}, "shard:h100:2", ""),
    ],
)
def test_share_has_one_number_of_shards_wherever_it_may_start(
    request_: dict[str, Any], wanted: str, not_on: str
) -> None:
    """That number is what most of the suitable GPUs need."""
    told = asked(UNEVEN, sharing=Sharing.SLOT, **request_)
    assert (gres(told), without(told)) == (wanted, not_on)


MODELS = (A100, H100, T4)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    nodes = []
    for name in draw(st.sampled_from(["one", "one two", "one two three four"])).split():
        models = draw(st.lists(st.sampled_from(MODELS), min_size=1, max_size=4))
        shards = {gres: draw(st.integers(1, 8)) for _, gres, _ in models}
        nodes.append(replace(node(name, *sorted(models)), shards=shards))
    return Cluster(name="lab", nodes=tuple(nodes))


@given(
    cluster=clusters(),
    gib=st.integers(0, 90),
    models=st.lists(st.sampled_from(["A100", "H100", "T4"]), max_size=2),
)
def test_every_gpu_that_slurm_may_choose_has_the_memory_in_as_many_shards(
    cluster: Cluster, gib: int, models: list[str]
) -> None:
    request = Request(devices=1, sharing=Sharing.SLOT, memory_bytes=gib * GIB, models=tuple(models))
    suited = {device.uuid for device in suitable(request, devices_of(cluster))}
    if not suited:
        with pytest.raises(TooMuchAsked):
            of(replace(TICKET, request=request), cluster)
        return
    job = of(replace(TICKET, request=request), cluster)
    kind, *types, count = job.gres.split(":")
    assert kind == "shard"
    by_uuid = {device.uuid: device for device in devices_of(cluster)}
    choice = {
        node.name: [
            by_uuid[device.uuid]
            for device in node.devices
            if node.slots_of(device) > 1 and device.gres in (types or [device.gres])
        ]
        for node in cluster.nodes
        if node.name not in job.excluded
    }
    assert able(request, cluster) == {name for name, devices in choice.items() if devices} != set()
    for device in itertools.chain.from_iterable(choice.values()):
        assert device.uuid in suited
        assert device.slots_for(request.memory_bytes) == int(count) < device.slots
        assert device.memory_bytes * int(count) >= request.memory_bytes * device.slots


@pytest.mark.parametrize(
    ("request_", "wanted", "not_on"),
    [
        ({}, "gpu:1", ""),
        ({"model": "A100", "devices": 2}, "gpu:a100:2", ""),
        ({"model": "T4"}, "gpu:t4:1", ""),
        ({"memory_bytes": 40 * GIB}, "gpu:1", "three"),
    ],
)
def test_whole_devices_are_asked_for_whether_shared_or_not(
    request_: dict[str, Any], wanted: str, not_on: str
) -> None:
    told = asked(SHARED, **request_)
    assert (gres(told), without(told)) == (wanted, not_on)


@pytest.mark.parametrize(
    ("cluster", "request_", "sentence"),
    [
        (CLUSTER, {}, "This hub has no shared GPU. Ask for a whole one"),
        (SHARED, {"model": "H100"}, "No H100 GPU is shared on this hub. Shared are 2 NVIDIA A100"),
        (SHARED, {"devices": 2}, "A share is of one GPU, and you asked for 2. Ask for 1."),
        (SHARED, {"memory_bytes": 31 * GIB}, "The largest share of a GPU has 30 GB: ask for less."),
    ],
)
def test_share_that_no_node_has_is_rejected(
    cluster: Cluster, request_: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(TooMuchAsked, match=re.escape(sentence)):
        asked(cluster, sharing=Sharing.SLOT, **request_)
    with pytest.raises(TooMuchAsked):
        able(Request(**{"devices": 1, "sharing": Sharing.SLOT, **request_}), cluster)


def needed(**needs: Any) -> list[str]:
    return words(of(replace(TICKET, request=Request(devices=1, model="A100")), CLUSTER, **needs))


def test_job_asks_for_the_memory_and_cpus_of_its_environment() -> None:
    told = needed(resources=JobResources(3 * 10**9, 1.5))
    assert {"--mem=2862M", "--cpus-per-task=2"} <= set(told)
    told = needed(resources=JobResources(cpus=0.25))
    assert {f"--mem={int(64 * 1024 * 0.9 / 2)}M", "--cpus-per-task=1"} <= set(told)


@pytest.mark.parametrize(
    ("needs", "sentence"),
    [
        (JobResources(64 * GIB), "needs 64 GB of memory, and no suitable machine has more than 66"),
        (JobResources(cpus=16.5), "needs 16.5 CPUs, and no suitable machine has more than 16."),
    ],
)
def test_environment_that_no_node_has_room_for_is_rejected(
    needs: JobResources, sentence: str
) -> None:
    with pytest.raises(TooMuchAsked, match=sentence):
        needed(resources=needs)


@pytest.mark.parametrize(
    ("guarantee", "limit", "in_job", "wanted"),
    [
        (None, None, True, 0),
        (2, None, True, 2),
        (None, 4, False, 4),
        (2, 4, False, 2),
        # There the container has the job's limit, and could not use its own.
        (2, 4, True, 4),
        (4, 2, True, 4),
    ],
)
def test_job_asks_for_the_guarantee_or_else_the_limit(
    guarantee: int | None, limit: int | None, in_job: bool, wanted: int
) -> None:
    assert resources_of(
        mem_guarantee=guarantee,
        mem_limit=limit,
        cpu_guarantee=guarantee,
        cpu_limit=limit,
        in_job=in_job,
    ) == JobResources(wanted, wanted)


def test_job_spec_contains_time_limit_owner_and_boost() -> None:
    told = words(of(replace(TICKET, seconds=3601), CLUSTER, user="ann", account="g-course"))
    assert {"--time=81", "--uid=ann", "--account=g-course"} <= set(told)
    told = words(of(replace(TICKET, boost=2.5), CLUSTER))
    assert "--nice=-2500" in told
    assert "--nice=1999997500" in words(of(replace(TICKET, boost=2.5, last=True), CLUSTER))


def test_suitable_nodes_are_listed_and_lacking_ones_excluded() -> None:
    def nodes(**request: Any) -> frozenset[str]:
        return able(Request(**{"devices": 1, **request}), CLUSTER)

    assert nodes() == {"one", "two", "three"}
    assert nodes(devices=2) == {"one"}
    assert nodes(model="H100") == {"two", "three"}
    assert nodes(model="T4") == {"three"}
    assert nodes(memory_bytes=40 * GIB) == {"one", "two"}

    request = Request(devices=1, memory_bytes=40 * GIB)
    told = words(of(replace(TICKET, request=request), CLUSTER, lacking=["two"]))
    assert without(told) == "three,two"


@pytest.mark.parametrize(
    ("limit", "minutes"),
    [("1-00:00:00", 1440), ("10:00", 10), ("2:30:00", 150), ("infinite", math.inf), ("", math.inf)],
)
def test_partition_time_limit_is_parsed_to_minutes(limit: str, minutes: float) -> None:
    assert minutes_of(limit) == minutes
