"""What a member may ask for, and the hours that the form offers. Pure; every field is untrusted."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from traitlets.config import Config

from gpuspawner.catalog.loader import Catalog
from gpuspawner.catalog.models import DeviceLimits, Environment, SessionHours
from gpuspawner.core.errors import (
    ConfigError,
    GPUSpawnerError,
    InvalidRequest,
    Refused,
    TooMuchAsked,
)
from gpuspawner.core.units import MICRO
from gpuspawner.leases.host_resources import HostAmount
from gpuspawner.leases.models import Request, Sharing
from gpuspawner.spawners.form import hour_choices, usual_label
from gpuspawner.spawners.mixin import GPUSpawnerMixin
from gpuspawner.spawners.options import (
    FIELDS,
    LEAST_HOURS,
    FormChoice,
    combine,
    data_choices,
    parse,
    resolve,
    session_seconds,
    with_data,
)

GB = 10**9
PYTORCH = Environment(
    image="lab",
    slug="pytorch",
    display_name="PyTorch",
    devices=DeviceLimits(default=1, max=4),
    models=("A100", "H100"),
    min_memory=40 * GB,
)
PLAIN = Environment(
    slug="plain", display_name="Plain Python", image="lab", devices=DeviceLimits(default=0, max=0)
)


# Parsing.


@pytest.mark.parametrize(
    ("fields", "choice"),
    [
        ({}, {}),
        ({"environment": "pytorch", "gpus": 2}, {"environment": "pytorch", "gpus": 2}),
        ({"gpus": ["share"], "gpu_model": "T4"}, {"gpus": "share", "gpu_model": "T4"}),
        (
            {"environment": ["pytorch"], "gpus": ["2"], "gpu_model": ["A100"], "gpu_memory": "40"},
            {"environment": "pytorch", "gpus": 2, "gpu_model": "A100", "gpu_memory": 40},
        ),
        ({"gpus": "0"}, {"gpus": 0}),
        ({"gpus": [" 3 "]}, {"gpus": 3}),
        ({"gpus": [""], "gpu_model": [""], "environment": [""]}, {}),
        ({"gpus": [], "gpu_model": None}, {}),
        ({"environment": "  pytorch "}, {"environment": "pytorch"}),
        ({"_xsrf": ["2|abc"], "gpus": ["1"]}, {"gpus": 1}),
        ({"hours": ["1.5"], "wait": ["no"]}, {"hours": 1.5, "wait": False}),
        ({"hours": 0.25, "wait": True}, {"hours": 0.25, "wait": True}),
        ({"hours": " .5 ", "wait": "YES"}, {"hours": 0.5, "wait": True}),
        ({"hours": 8760, "wait": [""]}, {"hours": 8760.0}),
        ({"hours": "", "wait": []}, {}),
        ({"account": ["group:course ml"]}, {"account": "group:course ml"}),
        ({"account": " member:anna "}, {"account": "member:anna"}),
        ({"account": [""]}, {}),
        ({"options": ["memory=large"]}, {"options": ("memory=large",)}),
        ({"options": "memory=large"}, {"options": ("memory=large",)}),
        ({"options": {"memory": "large", "a": "b"}}, {"options": ("memory=large", "a=b")}),
        ({"options": ["x.memory=a", "y.memory=b"]}, {"options": ("x.memory=a", "y.memory=b")}),
        (
            {"environment": ["y"], "options": ["x.memory=a", "", "y.memory=b"]},
            {"environment": "y", "options": ("memory=b",)},
        ),
        ({"environment": "z", "options": ["x.memory=a"]}, {"environment": "z"}),
        ({"options": [""]}, {}),
        ({"options": {}}, {}),
        ({"shown_at": ["2026-10-01T08:00:00+02:00"]}, {"shown_at": "2026-10-01T06:00:00+00:00"}),
    ],
)
def test_options_from_forms_links_and_rest_are_parsed(fields: Any, choice: dict[str, Any]) -> None:
    assert parse(fields) == FormChoice(**choice)


@pytest.mark.parametrize(
    "name",
    [
        *("image", "devices", "device_ids", "NVIDIA_VISIBLE_DEVICES", "volumes", "mounts"),
        *("mem_limit", "spawner_override", "profile", "gpus ", "GPUS"),
    ],
)
def test_unknown_option_is_rejected_by_name(name: str) -> None:
    """Fields of an admin's own form pass, and change nothing."""
    fields = {"gpus": 1, name: {"privileged": True}}
    with pytest.raises(InvalidRequest) as caught:
        parse(fields)
    assert repr(name) in caught.value.message
    assert "environment, gpus, gpu_model, gpu_memory, hours, wait, account" in caught.value.message
    assert caught.value.fields["field"] == name
    assert parse(fields, foreign=True) == FormChoice(gpus=1)


PAYER = "member:NAME or group:NAME"
LONG = "group:" + "x" * 5000
NUMBER = "a number of hours from 0.25 to 8760, such as 1.5, not "
NO_HOURS = [
    *(0, -1, 0.0, -0.5, 0.2, 8760.01, 1e9, 10**9, 1e-300, True),
    *(float("nan"), float("inf"), float("-inf")),
    *("0", "-1", "0.24", "8761", "1e9", "1e0", "1000000000", "9" * 5000, "nan", "NaN", "inf"),
    *("Infinity", "two", "2h", "1:30", "1,5", "1.5.", "0x2", "1_0", "\u0662", ".", "+2", "2 3"),
    *({"hours": 1}, b"2"),
]
NO_TIMES = ["now", "2026-10-01T08:00:00", "0001-01-01T00:00:00+14:00", "9" * 99, "-1"]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("account", "course", f"{PAYER}, not 'course'"),
        *(("account", a, PAYER) for a in ("system:grants", "group: ", "group:a\x00b", 7, LONG)),
        ("gpus", "Share", "whole number from 0, or 'share', not 'Share'"),
        ("gpus", "two", "whole number from 0, or 'share', not 'two'"),
        ("gpus", "-1", "whole number from 0, or 'share', not '-1'"),
        *(("gpus", n, "whole number") for n in ("1.5", 1.5, True, "\u0661", "1e3", "9" * 5000)),
        ("gpus", {"count": 1}, "whole number"),
        ("gpus", ["1", "2"], "given more than once"),
        *(
            ("gpu_memory", memory, "must be a whole number of GB from 1, such as 10, not ")
            for memory in ("80GB", 0, "0", -1, "-8", 1.5, "1.5", True, "9" * 5000, 10**9, [[8]])
        ),
        *(("environment", e, "short text") for e in (7, {"slug": "a"}, "a\nb", "a\x00")),
        ("environment", ["a", "b"], "given more than once"),
        ("gpu_model", "A" * 129, "short text"),
        ("gpu_model", ["A100", "T4"], "given more than once"),
        ("hours", ["1", "2"], "given more than once"),
        *(("hours", hours, NUMBER) for hours in NO_HOURS),
        ("wait", "later", "must be yes or no, not 'later'"),
        *(("wait", wait, "must be yes or no") for wait in (1, {"no": 1})),
        *(("shown_at", at, "must be a time such as '2026-10-01T08") for at in NO_TIMES),
    ],
)
def test_invalid_option_value_is_rejected_by_field(field: str, value: Any, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse({field: value})
    assert f"The field {field!r} " in caught.value.message and words in caught.value.message
    assert len(caught.value.message) < 200, "a flood is not sent back"
    assert caught.value.fields["field"] == field


@pytest.mark.parametrize("fields", [None, [], "gpus=1", 3])
def test_non_mapping_options_and_huge_numbers_are_rejected(fields: Any) -> None:
    with pytest.raises(InvalidRequest, match="must be fields with values"):
        parse(fields)
    with pytest.raises(TooMuchAsked, match="You asked for 1025 GPUs"):
        parse({"gpus": 1025})
    for field in ("gpus", "gpu_memory", "hours", "wait", "environment", "options", "shown_at"):
        for value in (10**6000, -(10**6000)):  # which Python does not write
            with pytest.raises(InvalidRequest, match=f"The field '{field}' must "):
                parse({field: value})


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(FIELDS) | st.text(), anything), st.booleans())
def test_any_options_are_parsed_or_rejected_with_a_message(fields: Any, foreign: bool) -> None:
    try:
        choice = parse(fields, foreign=foreign)
    except GPUSpawnerError as error:
        assert isinstance(error, Refused) and error.message.endswith((".", "?"))
        return
    assert choice.gpus is None or 0 <= choice.gpus <= 1024
    assert choice.environment is None or choice.environment.isprintable()
    assert choice.hours is None or 0.25 <= choice.hours <= 8760
    assert json.loads(json.dumps(choice.as_user_options())) == choice.as_user_options()
    assert parse(choice.as_user_options()) == choice


# From the choice to the request.


USUAL = Request(devices=1, environment="pytorch", models=("A100", "H100"), memory_bytes=40 * GB)


@pytest.mark.parametrize(
    ("choice", "asked"),
    [
        ({}, USUAL),
        (
            {"environment": "pytorch", "gpus": 2, "gpu_model": "A100", "gpu_memory": 80},
            replace(USUAL, devices=2, model="A100", memory_bytes=80 * GB, smallest=True),
        ),
        ({"gpus": 1, "gpu_memory": 8}, replace(USUAL, smallest=True)),
        ({"gpus": 0, "gpu_memory": 8}, Request(environment="pytorch")),
        ({"gpus": 0}, Request(environment="pytorch")),
        ({"gpus": 0, "gpu_model": "A100"}, Request(environment="pytorch")),
    ],
    ids=[
        *("not said", "said", "the environment needs more", "memory of none"),
        *("without", "without, of a model"),
    ],
)
def test_request_combines_choice_and_environment_needs(
    choice: dict[str, Any], asked: Request
) -> None:
    assert resolve(FormChoice(**choice), PYTORCH, limit=8) == asked


def test_environment_may_require_gpu_and_limit_caps_its_default() -> None:
    needy = PYTORCH.model_copy(
        update={"cpu_variant": False, "min_driver": "550.54", "min_cuda": "12.4"}
    )
    assert resolve(FormChoice(), needy, 8).min_driver == "550.54"
    assert resolve(FormChoice(gpus=2), needy, 8).min_cuda == "12.4"
    with pytest.raises(TooMuchAsked, match="does not run without a GPU"):
        resolve(FormChoice(gpus=0), needy, 8)
    with pytest.raises(TooMuchAsked, match="Choose another: you may have no GPU here"):
        resolve(FormChoice(), needy, 0)

    two = Environment(
        slug="two", display_name="Two", image="lab", devices=DeviceLimits(default=2, max=4)
    )
    assert resolve(FormChoice(), two, limit=1).devices == 1
    assert resolve(FormChoice(), two, limit=0) == Request(environment="two")
    assert resolve(FormChoice(), PLAIN, limit=8) == Request(environment="plain")
    usual = HostAmount(2**33, 1500)
    plain = Request(environment="plain", host_memory_bytes=2**33, host_milli_cpus=1500)
    assert resolve(FormChoice(), PLAIN, 8, usual) == plain
    only = Catalog.single(devices=DeviceLimits(default=1, max=1024)).environments[0]
    assert resolve(FormChoice(), only, limit=8) == Request(devices=1, environment="default")


@pytest.mark.parametrize(
    ("gpus", "environment", "limit", "rest"),
    [
        (3, PYTORCH, 2, "3 GPUs; your limit is 2 for one server. Ask for 2 or fewer."),
        (5, PYTORCH, 8, "5 GPUs; PyTorch allows 4. Ask for 4 or fewer."),
        (1, PLAIN, 8, "1 GPU, but Plain Python runs without one. Ask for 0."),
        (1, PYTORCH, 0, "1 GPU; your limit is 0 for one server. Ask for 0."),
        (1, PLAIN, 0, "1 GPU; Plain Python allows 0. Ask for 0."),
    ],
)
def test_request_above_a_limit_says_what_would_fit(
    gpus: int, environment: Environment, limit: int, rest: str
) -> None:
    with pytest.raises(TooMuchAsked) as caught:
        resolve(FormChoice(gpus=gpus), environment, limit)
    assert caught.value.message == f"You asked for {rest}"


# Shares of a device.

EITHER = PYTORCH.model_copy(update={"sharing": "any"})
SHARED = PYTORCH.model_copy(update={"sharing": "slot", "devices": DeviceLimits()})


@pytest.mark.parametrize(
    ("gpus", "environment", "devices", "sharing"),
    [
        ("share", EITHER, 1, Sharing.SLOT),
        (2, EITHER, 2, Sharing.WHOLE),
        (None, EITHER, 1, Sharing.WHOLE),
        ("share", SHARED, 1, Sharing.SLOT),
        (None, SHARED, 1, Sharing.SLOT),
        (0, SHARED, 0, Sharing.WHOLE),
        (None, PYTORCH, 1, Sharing.WHOLE),
    ],
)
def test_share_is_asked_for_in_place_of_a_number(
    gpus: int | str | None, environment: Environment, devices: int, sharing: Sharing
) -> None:
    asked = resolve(FormChoice(gpus=gpus), environment, limit=8)
    assert (asked.devices, asked.sharing) == (devices, sharing)
    if devices:
        assert asked.models == PYTORCH.models


@pytest.mark.parametrize(
    ("gpus", "environment", "limit", "message"),
    [
        ("share", PYTORCH, 8, "PyTorch needs whole GPUs, not a share of one. Ask for 1 or more."),
        ("share", PLAIN, 8, "You asked for a share of a GPU, but Plain Python runs without one."),
        ("share", EITHER, 0, "You asked for a share of a GPU; your limit is 0 for one server."),
        (1, SHARED, 8, "PyTorch runs on a share of a GPU, not on whole ones. Ask for a share, or"),
        (2, SHARED, 8, "PyTorch runs on a share of a GPU, not on whole ones."),
    ],
)
def test_share_that_cannot_be_had_is_refused_with_what_to_do(
    gpus: int | str, environment: Environment, limit: int, message: str
) -> None:
    with pytest.raises(Refused) as caught:
        resolve(FormChoice(gpus=gpus), environment, limit)
    assert caught.value.message.startswith(message)
    assert caught.value.fields["field"] == "gpus"


def test_limit_of_no_gpu_means_no_share_by_default() -> None:
    assert resolve(FormChoice(), SHARED, limit=0) == Request(environment="pytorch")


# Session length.


def limited(usual: float | None, most: float | None) -> SessionHours:
    return SessionHours(default=usual, max=most)


@pytest.mark.parametrize(
    ("own", "general", "holds"),
    [
        ((None, None), (None, None), (None, None)),
        ((None, None), (8, 24), (8, 24)),
        ((None, None), (None, 24), (24, 24)),
        ((None, None), (8, None), (8, None)),
        ((4, 12), (8, 24), (4, 12)),
        ((4, 48), (8, 24), (4, 24)),
        ((48, None), (8, 24), (24, 24)),
        ((None, 4), (8, 24), (4, 4)),
        ((None, 4), (None, None), (4, 4)),
        ((4, None), (None, None), (4, None)),
    ],
)
def test_smaller_session_limit_and_environment_default_win(
    own: Any, general: Any, holds: Any
) -> None:
    assert combine(limited(*own), limited(*general)) == limited(*holds)


def test_session_length_is_chosen_or_default_within_limits() -> None:
    slow = Environment(slug="slow", display_name="Slow", image="lab", hours=SessionHours(max=12))

    def seconds(hours: float | None, usual: float | None, most: float | None) -> int | None:
        return session_seconds(FormChoice(hours=hours), limited(usual, most), slow)

    assert seconds(None, 8, 24) == 8 * 3600
    assert seconds(1.5, 8, 24) == 5400
    assert seconds(24, 8, 24) == 24 * 3600
    assert seconds(None, None, None) is None
    assert seconds(0.25, None, None) == 900
    assert seconds(None, 0.0001, 0.0001) == 1
    with pytest.raises(TooMuchAsked) as caught:
        seconds(12.5, 8, 12)
    assert caught.value.message == (
        "The field 'hours' asks for 12.5 hours; Slow allows 12 for one session. Write 12 or less."
    )
    with pytest.raises(TooMuchAsked, match="your limit is 4 for one session"):
        seconds(12.5, 4, 4)


# Datasets and folders.


CATALOG = Catalog.from_mapping(
    {
        "environments": [
            {"slug": "lab", "image": "x"},
            {"slug": "course", "image": "x", "datasets": ["flowers"], "shared_folders": []},
        ],
        "datasets": {
            "flowers": {"source": "/srv/flowers"},
            "secrets": {"source": "/srv/secrets", "allowed_groups": ["staff"]},
        },
        "shared_folders": {"team": {"source": "/srv/team"}},
    }
)
LAB, COURSE = CATALOG.environments


def mounted(chosen: Any, *, course: bool = False, groups: tuple[str, ...] = ()) -> list[str]:
    choice = parse({} if chosen is None else {"data": chosen})
    environment = with_data(CATALOG, COURSE if course else LAB, choice.data, groups)
    return [mount.name for mount in CATALOG.mounts_for(environment, groups)]


def test_members_get_all_or_chosen_data_of_their_environment() -> None:
    assert mounted(None) == ["flowers", "team"]
    assert mounted(None, groups=("staff",)) == ["flowers", "secrets", "team"]
    assert mounted(["team"]) == ["team"]
    assert mounted("flowers") == ["flowers"]
    assert mounted([""]) == [], "a form without a mark in it"
    assert mounted(["", "flowers", "flowers"]) == ["flowers"]
    assert mounted(["flowers", "team"], course=True) == ["flowers"]


@pytest.mark.parametrize("name", ["nope", "secrets", "../flowers", "/srv/secrets"])
def test_unavailable_data_is_rejected_by_name(name: str) -> None:
    with pytest.raises(InvalidRequest, match="You have: flowers, team") as refusal:
        mounted([name])
    assert repr(name) in refusal.value.message


@pytest.mark.parametrize(
    "value", [5, {"flowers": True}, [["flowers"]], ["a\nb"], ["x" * 200], ["x"] * 300]
)
def test_invalid_data_list_is_rejected(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="'data'"):
        parse({"data": value})


def test_stored_data_choice_is_restored_in_the_form() -> None:
    stored = parse({"data": ["", "team"], "gpu_model": [""]}).as_user_options()
    assert stored == {"data": ["team"]}
    assert parse(stored).data == ("team",)
    assert parse({"data": [""]}).as_user_options() == {"data": []}

    found = data_choices(CATALOG, [LAB, COURSE], (), ("team",))
    assert [(each.name, each.where, each.checked) for each in found] == [
        ("flowers", "lab course", False),
        ("team", "lab", True),
    ]
    assert all(each.checked for each in data_choices(CATALOG, [LAB], (), None))


# Hours.


ANY = Environment(slug="any", display_name="Any", image="lab")


def labels(*most: float | None, last: float | None = None, rates: Any = ()) -> list[str]:
    limits = [SessionHours(max=each) for each in most]
    return [choice.label for choice in hour_choices(limits, last, rates)]


def test_form_offers_session_lengths_with_prices() -> None:
    assert labels(6) == labels(6, 1.5) == ["1 h", "2 h", "4 h", "6 h"]
    assert labels(0.5) == ["30 min"]
    assert labels(None)[-1] == "7 d"
    assert labels() == []
    # What was chosen last time is offered while it is allowed.
    assert labels(4, last=1.25) == ["1 h", "1 h 15 min", "2 h", "4 h"]
    assert labels(4, last=5) == ["1 h", "2 h", "4 h"]

    one = labels(2, rates=[4 * MICRO])
    assert one == ["1 h, 4.00 credits a GPU", "2 h, 8.00 credits a GPU"]
    some = labels(1, rates=[10 * MICRO, MICRO // 2, 4 * MICRO])
    assert some == ["1 h, 0.50 to 10.00 credits a GPU"]
    assert labels(1, rates=[0, 0]) == ["1 h"]

    assert usual_label([limited(8, 24)]) == "as usual: 8 h"
    assert usual_label([limited(8, 24), limited(2, 4)]) == "Default"
    assert usual_label([SessionHours()]) == usual_label([]) == "until I stop it"


limits = st.builds(
    SessionHours,
    default=st.none(),
    max=st.none() | st.floats(0.001, 8760, allow_subnormal=False),
)


@given(limits, st.none() | st.floats(LEAST_HOURS, 8760))
def test_every_offered_session_length_is_accepted(limit: SessionHours, last: float | None) -> None:
    for choice in hour_choices([limit], last, [MICRO]):
        chosen = parse({"hours": [choice.value]})
        assert chosen.hours == choice.hours
        seconds = session_seconds(chosen, limit, ANY)
        assert seconds is not None and abs(seconds - 3600 * choice.hours) <= 0.5


# The settings.


def hours(**settings: Any) -> GPUSpawnerMixin:
    return GPUSpawnerMixin(config=Config({"GPUSpawnerMixin": settings}))


def test_session_hour_settings_accept_numbers_or_callables() -> None:
    assert hours().session_hours(ANY) == SessionHours()
    assert hours(most_hours=24, default_hours=8.5).session_hours(ANY) == limited(8.5, 24)
    asked: list[GPUSpawnerMixin] = []

    def most(spawner: GPUSpawnerMixin) -> int:
        asked.append(spawner)
        return 12

    spawner = hours(most_hours=most)
    assert spawner.session_hours(ANY) == limited(12, 12)
    assert asked == [spawner]
    assert hours(most_hours=lambda spawner: None).session_hours(ANY) == SessionHours()


@pytest.mark.parametrize("trait", ["most_hours", "default_hours"])
@pytest.mark.parametrize("value", [0, -1, 8761, 1e9, float("nan"), float("inf"), True, "two"])
def test_invalid_session_hour_setting_is_named(trait: str, value: Any) -> None:
    spawner = hours(**{trait: lambda spawner: value})
    with pytest.raises(ConfigError) as caught:
        spawner.session_hours(ANY)
    assert f"c.GPUSpawnerMixin.{trait} is {value!r}" in caught.value.message


def test_choice_that_started_is_kept_in_the_state() -> None:
    spawner, after = hours(), hours()
    spawner.last_started = {"gpus": 2, "wait": False}
    after.load_state(spawner.get_state())
    assert after.last_started == spawner.last_started
    after.clear_state()  # as before each start
    assert after.get_state()["last_started"] == spawner.last_started
    spawner.load_state({})
    assert spawner.last_started == {}
