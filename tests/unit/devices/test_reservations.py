"""Devices that are reserved for groups: the setting, who gets what, and the refusals. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from traitlets.config import Config

from gpuspawner.core.errors import ConfigError, NoDeviceFree, TooMuchAsked
from gpuspawner.devices.models import Device
from gpuspawner.devices.placement import PlacementIndex, texts
from gpuspawner.devices.reservations import (
    OPEN,
    Reservation,
    check_reserved,
    may_use,
    with_reservations,
)
from gpuspawner.leases.models import Request, Sharing, Slot
from gpuspawner.settings import ServiceSettings

GIB = 2**30
LAB = ("vision-lab",)


def device(index: int, model: str = "A100", gib: int = 80, **fields: Any) -> Device:
    return Device(
        uuid=f"GPU-{index:04d}", index=index, model=model, memory_bytes=gib * GIB, **fields
    )


def chosen(devices: list[Device], /, *taken: int, **asked: Any) -> list[int]:
    """The indices of the devices that a request for one gets, unless it says another number."""
    request = Request(**{"devices": 1, **asked})
    places = texts(Slot(f"GPU-{index:04d}") for index in taken)
    return [int(slot.uuid[-4:]) for slot in PlacementIndex(devices, {}).choose(request, places)]


# The setting.


def test_setting_is_a_list_of_groups_or_says_what_others_may_do() -> None:
    wanted = {"A100": ["b", "a", "a"], "GPU-1": {"groups": ["c"], "others": "preemptible"}}
    assert check_reserved(wanted) == {
        "A100": Reservation(("a", "b")),
        "GPU-1": Reservation(("c",), lent=True),
    }


@pytest.mark.parametrize(
    ("name", "wanted", "says"),
    [
        ("", ["lab"], "'' in c.GPUDevices.reserved names no device. Write part of a model's"),
        (4, ["lab"], "4 in c.GPUDevices.reserved names no device"),
        ("T4", "lab", r"c.GPUDevices.reserved\['T4'\] is not a list of groups. Write \[\"vision"),
        ("T4", [3], "is not a list of groups"),
        ("T4", [" "], "is not a list of groups"),
        ("T4", None, "is not a list of groups"),
        ("T4", [], "names no group, so nobody could use the device.*drain it"),
        ("T4", {"groups": []}, "names no group"),
        ("T4", {"others": "never"}, "is not a list of groups"),
        ("T4", {"groups": ["a"], "other": 1}, "'other' in .* is not known. The keys are 'groups'"),
        ("T4", {"groups": ["a"], "others": "yes"}, "'yes' is not what others may do"),
        ("T4", {"groups": ["a"], "others": []}, r"\[\] is not what others may do"),
    ],
)
def test_invalid_setting_is_refused_with_a_sentence(name: Any, wanted: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_reserved({name: wanted})


def test_reservations_on_a_cluster_are_left_to_slurm() -> None:
    settings = Config({"GPUDevices": {"reserved": {"A100": ["lab"]}}})
    ServiceSettings.read(settings).require_valid()
    settings.GPUSlurm.cluster_file = "/etc/cluster.yaml"
    with pytest.raises(ConfigError, match=r"does not apply to a cluster.*reserve nodes in Slurm"):
        ServiceSettings.read(settings).require_valid()


def test_uuid_goes_before_model_and_longer_model_before_shorter() -> None:
    reserved = check_reserved({"A100": ["a"], "A100-80GB": ["b"], "GPU-0002": ["c"]})
    devices = [
        device(0, "NVIDIA A100-SXM4-40GB"),
        device(1, "NVIDIA A100-SXM4-80GB"),
        device(2, "NVIDIA A100-SXM4-80GB"),
        device(3, "NVIDIA A100-SXM4-80GB MIG 1g.10gb", parent_uuid="GPU-0002"),
        device(4, "T4"),
    ]
    found = with_reservations(devices, reserved, {})
    assert [each.reserved_for for each in found] == [("a",), ("b",), ("c",), ("c",), ()]
    known = {"GPU-0000": OPEN, "GPU-0004": Reservation(LAB, lent=True)}
    found = with_reservations(devices, reserved, known)
    assert (found[0].reserved_for, found[4].reserved_for, found[4].lent) == ((), LAB, True)


# Who gets what.


def test_only_members_of_the_groups_get_a_reserved_device() -> None:
    devices = [device(0, reserved_for=LAB), device(1)]
    assert chosen(devices) == [1]
    assert chosen(devices, groups=LAB) == [0], "the fewest others can use it"
    assert chosen(devices, 0, groups=LAB) == [1]
    with pytest.raises(NoDeviceFree):
        chosen(devices, 1)


def test_lent_device_is_for_preemptible_runs_if_no_other_is_free() -> None:
    lent = [device(0, reserved_for=LAB, lent=True), device(1)]
    assert chosen(lent, preemptible=True) == [1]
    assert chosen(lent, 1, preemptible=True) == [0]
    with pytest.raises(NoDeviceFree):
        chosen([replace(lent[0], lent=False), lent[1]], 1, preemptible=True)
    with pytest.raises(NoDeviceFree):
        chosen(lent, 1)


def test_reserved_device_goes_before_a_smaller_one() -> None:
    devices = [device(0, reserved_for=LAB), device(1, "T4", 16), device(2, "T4", 24)]
    assert chosen(devices, groups=LAB) == [0]
    assert chosen(devices, groups=LAB, model="T4") == [1]


def test_several_devices_are_all_reserved_or_all_open() -> None:
    devices = [device(index, reserved_for=LAB if index < 2 else ()) for index in range(4)]
    assert chosen(devices, groups=LAB, devices=2) == [0, 1]
    assert chosen(devices, devices=2) == [2, 3]
    assert chosen(devices, 0, groups=LAB, devices=2) == [2, 3]
    with pytest.raises(TooMuchAsked) as refused:
        chosen(devices, groups=LAB, devices=3)
    assert refused.value.message == (
        "You asked for 3 GPUs. This hub has 4 GPUs, and those of one server are of one model and "
        "reserved alike: 2 A100 reserved for vision-lab and 2 A100. Ask for 2 at most."
    )


def test_slot_of_a_reserved_device_goes_first() -> None:
    devices = [device(0, slots=2), device(1, slots=2, reserved_for=LAB)]
    index = PlacementIndex(devices, {})
    request = Request(devices=1, sharing=Sharing.SLOT)
    taken = texts([Slot("GPU-0000")])
    assert index.choose(request, taken) == (Slot("GPU-0000", 1),)
    assert index.choose(replace(request, groups=LAB), taken) == (Slot("GPU-0001", 0),)


def test_request_of_a_member_has_only_groups_that_count() -> None:
    index = PlacementIndex([device(0, reserved_for=("a", "b"))], {})
    asked = index.of_member(Request(devices=1), frozenset("zba"), preemptible=True)
    assert (asked.groups, asked.preemptible) == (("a", "b"), True)
    open_index, request = PlacementIndex([device(0)], {}), Request(devices=1)
    assert open_index.of_member(request, frozenset("zba"), preemptible=True) is request


@st.composite
def fleets(draw: st.DrawFn) -> list[Device]:
    groups = st.sampled_from([(), ("a",), ("b",), ("a", "b")])
    return [
        device(
            index,
            draw(st.sampled_from(["T4", "A100"])),
            draw(st.sampled_from([16, 40])),
            reserved_for=draw(groups),
            lent=draw(st.booleans()),
            slots=draw(st.sampled_from([1, 1, 3])),
        )
        for index in range(draw(st.integers(1, 7)))
    ]


requests = st.builds(
    Request,
    devices=st.integers(1, 3),
    groups=st.sampled_from([(), ("a",), ("b",), ("a", "b")]),
    preemptible=st.booleans(),
    sharing=st.sampled_from(Sharing),
)


@given(fleets(), requests, st.sets(st.integers(0, 6)))
def test_nobody_gets_a_device_that_they_may_not_use(
    devices: list[Device], request: Request, taken: set[int]
) -> None:
    index = PlacementIndex(devices, {})
    places = texts(Slot(d.uuid) for d in devices if d.index in taken)
    try:
        found = [index.by_uuid[slot.uuid] for slot in index.choose(request, places)]
    except NoDeviceFree as refused:
        usable = [d for d in devices if may_use(request, d)]
        assert refused.fields["matching"] <= len(usable)
        return
    except TooMuchAsked:
        return
    assert all(may_use(request, each) for each in found)
    assert len({(d.model, d.reserved_for, d.lent) for d in found}) == 1
    for each in found:
        if each.reserved_for and set(request.groups).isdisjoint(each.reserved_for):
            assert each.lent and request.preemptible


# Refusals.


@pytest.mark.parametrize(
    ("devices", "asked", "says"),
    [
        (
            [device(0, reserved_for=LAB), device(1, reserved_for=("a", "b")), device(2, "T4")],
            {"model": "A100"},
            "All A100 GPUs here are reserved for a, b and vision-lab.",
        ),
        (
            [device(0, reserved_for=LAB, lent=True)],
            {},
            "The only GPU here is reserved for vision-lab. Preemptible runs of others may use what "
            "is idle.",
        ),
        (
            [device(0, reserved_for=LAB, slots=4), device(1, reserved_for=LAB, slots=4)],
            {"sharing": Sharing.SLOT},
            "All shared GPUs here are reserved for vision-lab.",
        ),
        (
            [device(0, reserved_for=LAB), device(1)],
            {"devices": 2},
            "You asked for 2 GPUs. This hub has 1 GPU that is not reserved for others. Ask for 1 "
            "at most.",
        ),
        (
            [device(0, reserved_for=LAB), device(1), device(2)],
            {"devices": 3},
            "You asked for 3 GPUs. This hub has 2 GPUs that are not reserved for others. Ask for "
            "2 at most.",
        ),
    ],
)
def test_refusal_says_for_whom_devices_are_reserved(
    devices: list[Device], asked: dict[str, Any], says: str
) -> None:
    with pytest.raises(TooMuchAsked) as refused:
        chosen(devices, **asked)
    assert refused.value.message == says


def test_wait_says_how_many_more_are_reserved() -> None:
    devices = [device(0), device(1, reserved_for=LAB), device(2, reserved_for=LAB)]
    with pytest.raises(NoDeviceFree) as refused:
        chosen(devices, 0, model="A100")
    assert refused.value.message == (
        "The only A100 GPU is in use. 2 more are reserved for vision-lab."
    )
    with pytest.raises(NoDeviceFree) as refused:
        chosen(devices, 0, 1, 2, groups=LAB)
    assert refused.value.message == "All 3 GPUs are in use."
