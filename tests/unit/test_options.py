"""What a member may ask for. Real: everything, it is pure; every field is text from a stranger."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuspawner.catalog.loader import Catalog
from gpuspawner.catalog.models import DeviceLimits, Environment, SessionHours
from gpuspawner.core.errors import GPUSpawnerError, InvalidRequest, Refused, TooMuchAsked
from gpuspawner.leases.models import Request
from gpuspawner.spawners.options import FIELDS, FormChoice, combine, parse, resolve, session_seconds

GB = 10**9
PYTORCH = Environment(
    slug="pytorch",
    display_name="PyTorch",
    devices=DeviceLimits(default=1, max=4),
    models=("A100", "H100"),
    min_memory=40 * GB,
)
PLAIN = Environment(slug="plain", display_name="Plain Python", devices=DeviceLimits(0, 0))


# Parsing.


@pytest.mark.parametrize(
    ("fields", "choice"),
    [
        ({}, FormChoice()),
        ({"environment": "pytorch", "gpus": 2}, FormChoice(environment="pytorch", gpus=2)),
        (
            {"environment": ["pytorch"], "gpus": ["2"], "gpu_model": ["A100"], "gpu_memory": "40"},
            FormChoice(environment="pytorch", gpus=2, gpu_model="A100", gpu_memory=40),
        ),
        ({"gpus": "0"}, FormChoice(gpus=0)),
        ({"gpus": [" 3 "]}, FormChoice(gpus=3)),
        ({"gpus": [""], "gpu_model": [""], "environment": [""]}, FormChoice()),
        ({"gpus": [], "gpu_model": None}, FormChoice()),
        ({"environment": "  pytorch "}, FormChoice(environment="pytorch")),
        ({"_xsrf": ["2|abc"], "gpus": ["1"]}, FormChoice(gpus=1)),
        ({"hours": ["1.5"], "wait": ["no"]}, FormChoice(hours=1.5, wait=False)),
        ({"hours": 0.25, "wait": True}, FormChoice(hours=0.25, wait=True)),
        ({"hours": " .5 ", "wait": "YES"}, FormChoice(hours=0.5, wait=True)),
        ({"hours": 8760, "wait": [""]}, FormChoice(hours=8760.0)),
        ({"hours": "", "wait": []}, FormChoice()),
        ({"account": ["group:course ml"]}, FormChoice(account="group:course ml")),
        ({"account": " member:anna "}, FormChoice(account="member:anna")),
        ({"account": [""]}, FormChoice()),
        ({"options": ["memory=large"]}, FormChoice(options=("memory=large",))),
        ({"options": "memory=large"}, FormChoice(options=("memory=large",))),
        ({"options": {"memory": "large", "a": "b"}}, FormChoice(options=("memory=large", "a=b"))),
        (
            {"options": ["x.memory=a", "y.memory=b"]},
            FormChoice(options=("x.memory=a", "y.memory=b")),
        ),
        (
            {"environment": ["y"], "options": ["x.memory=a", "", "y.memory=b"]},
            FormChoice(environment="y", options=("memory=b",)),
        ),
        ({"environment": "z", "options": ["x.memory=a"]}, FormChoice(environment="z")),
        ({"options": [""]}, FormChoice()),
        ({"options": {}}, FormChoice()),
        (
            {"shown_at": ["2026-10-01T08:00:00+02:00"]},
            FormChoice(shown_at="2026-10-01T06:00:00+00:00"),
        ),
    ],
)
def test_values_as_forms_links_and_rest_send_them(fields: Any, choice: FormChoice) -> None:
    assert parse(fields) == choice


def test_what_is_stored_is_what_was_said_and_reads_back_the_same() -> None:
    choice = parse({"environment": ["pytorch"], "gpus": ["0"], "gpu_model": [""]})
    assert choice.as_user_options() == {"environment": "pytorch", "gpus": 0}
    assert parse(choice.as_user_options()) == choice


SMUGGLED = [
    {"image": "evil/image"},
    {"devices": ["GPU-1234"]},
    {"device_ids": "GPU-1234"},
    {"NVIDIA_VISIBLE_DEVICES": "all"},
    {"volumes": {"/": "/host"}},
    {"mounts": ["/etc:/etc"]},
    {"mem_limit": "1T"},
    {"spawner_override": {"privileged": True}},
    {"profile": "root"},
    {"gpus ": 1},
    {"GPUS": 1},
]


@pytest.mark.parametrize("fields", SMUGGLED)
def test_nothing_else_can_be_smuggled_in(fields: dict[str, Any]) -> None:
    (name,) = fields
    with pytest.raises(InvalidRequest) as caught:
        parse({"gpus": 1, **fields})
    assert repr(name) in caught.value.message
    assert "environment, gpus, gpu_model, gpu_memory, hours, wait, account" in caught.value.message
    assert caught.value.fields["field"] == name


@pytest.mark.parametrize("fields", SMUGGLED)
def test_fields_of_an_admins_own_form_pass_and_change_nothing(fields: dict[str, Any]) -> None:
    assert parse({"gpus": 1, **fields}, foreign=True) == FormChoice(gpus=1)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("account", "course", "member:NAME or group:NAME, not 'course'"),
        ("account", "system:grants", "member:NAME or group:NAME"),
        ("account", "group: ", "member:NAME or group:NAME"),
        ("account", "group:a\x00b", "member:NAME or group:NAME"),
        ("account", 7, "member:NAME or group:NAME"),
        ("account", "group:" + "x" * 5000, "member:NAME or group:NAME"),
        ("gpus", "two", "whole number from 0, not 'two'"),
        ("gpus", "-1", "whole number from 0, not '-1'"),
        ("gpus", "1.5", "whole number"),
        ("gpus", 1.5, "whole number"),
        ("gpus", True, "whole number"),
        ("gpus", "\u0661", "whole number"),
        ("gpus", "1e3", "whole number"),
        ("gpus", "9" * 5000, "whole number"),
        ("gpus", {"count": 1}, "whole number"),
        ("gpus", ["1", "2"], "given more than once"),
        ("gpu_memory", "80GB", "whole number"),
        ("environment", 7, "short text"),
        ("environment", ["a", "b"], "given more than once"),
        ("environment", {"slug": "a"}, "short text"),
        ("environment", "a\nb", "short text"),
        ("environment", "a\x00", "short text"),
        ("gpu_model", "A" * 129, "short text"),
        ("gpu_model", ["A100", "T4"], "given more than once"),
        ("hours", ["1", "2"], "given more than once"),
        ("wait", "later", "must be yes or no, not 'later'"),
        ("wait", 1, "must be yes or no"),
        ("wait", {"no": 1}, "must be yes or no"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(field: str, value: Any, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse({field: value})
    assert f"The field {field!r} " in caught.value.message and words in caught.value.message
    assert len(caught.value.message) < 200, "a flood is not sent back"
    assert caught.value.fields["field"] == field


NO_HOURS = [
    *(0, -1, 0.0, -0.5, 0.2, 8760.01, 1e9, 10**9, 1e-300, True),
    *(float("nan"), float("inf"), float("-inf")),
    *("0", "-1", "0.24", "8761", "1e9", "1e0", "1000000000", "9" * 5000, "nan", "NaN", "inf"),
    *("Infinity", "two", "2h", "1:30", "1,5", "1.5.", "0x2", "1_0", "\u0662", ".", "+2", "2 3"),
    *({"hours": 1}, b"2"),
]


@pytest.mark.parametrize("value", NO_HOURS)
def test_hours_that_make_no_sense_are_named_with_the_limits(value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse({"hours": value})
    said = "The field 'hours' must be a number of hours from 0.25 to 8760, such as 1.5, not "
    assert caught.value.message.startswith(said)
    assert len(caught.value.message) < 200, "a flood is not sent back"
    assert caught.value.fields["field"] == "hours"


@pytest.mark.parametrize(
    "value", ["now", "2026-10-01T08:00:00", "0001-01-01T00:00:00+14:00", "9" * 99, "-1"]
)
def test_a_time_that_is_none_is_named(value: str) -> None:
    with pytest.raises(InvalidRequest, match="'shown_at' must be a time such as '2026-10-01T08"):
        parse({"shown_at": value})


@pytest.mark.parametrize("field", ["gpus", "gpu_memory", "hours", "wait"])
def test_a_number_that_python_does_not_write_is_refused_in_words(field: str) -> None:
    for value in (10**6000, -(10**6000)):
        with pytest.raises(InvalidRequest, match=f"The field '{field}' must be"):
            parse({field: value})


@pytest.mark.parametrize("fields", [None, [], "gpus=1", 3])
def test_what_is_no_fields_at_all_is_refused(fields: Any) -> None:
    with pytest.raises(InvalidRequest, match="must be fields with values"):
        parse(fields)


def test_nobody_gets_thousands() -> None:
    with pytest.raises(TooMuchAsked, match="You asked for 1025 GPUs"):
        parse({"gpus": 1025})


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(FIELDS) | st.text(), anything), st.booleans())
def test_whatever_is_sent_is_understood_or_refused_in_words(fields: Any, foreign: bool) -> None:
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


def test_what_is_not_said_is_the_environments() -> None:
    assert resolve(FormChoice(), PYTORCH, limit=8) == Request(
        devices=1, environment="pytorch", models=("A100", "H100"), memory_bytes=40 * GB
    )


def test_what_is_said_is_asked_for_within_what_the_environment_needs() -> None:
    choice = FormChoice(environment="pytorch", gpus=2, gpu_model="A100", gpu_memory=80)
    assert resolve(choice, PYTORCH, limit=8) == Request(
        devices=2,
        environment="pytorch",
        model="A100",
        models=("A100", "H100"),
        memory_bytes=80 * GB,
    )
    assert resolve(FormChoice(gpus=1, gpu_memory=8), PYTORCH, limit=8).memory_bytes == 40 * GB


@pytest.mark.parametrize("choice", [FormChoice(gpus=0), FormChoice(gpus=0, gpu_model="A100")])
def test_without_a_gpu_nothing_of_gpus_is_asked(choice: FormChoice) -> None:
    assert resolve(choice, PYTORCH, limit=8) == Request(environment="pytorch")


def test_an_environment_may_need_a_gpu_and_a_driver() -> None:
    needy = replace(PYTORCH, cpu_variant=False, min_driver="550.54", min_cuda="12.4")
    assert resolve(FormChoice(), needy, 8).min_driver == "550.54"
    assert resolve(FormChoice(gpus=2), needy, 8).min_cuda == "12.4"
    with pytest.raises(TooMuchAsked, match="does not run without a GPU"):
        resolve(FormChoice(gpus=0), needy, 8)
    with pytest.raises(TooMuchAsked, match="Choose another: you may have none here"):
        resolve(FormChoice(), needy, 0)


def test_a_limit_below_the_default_gives_what_it_allows() -> None:
    two = Environment(slug="two", display_name="Two", devices=DeviceLimits(default=2, max=4))
    assert resolve(FormChoice(), two, limit=1).devices == 1
    assert resolve(FormChoice(), two, limit=0) == Request(environment="two")
    assert resolve(FormChoice(), PLAIN, limit=8) == Request(environment="plain")


@pytest.mark.parametrize(
    ("gpus", "environment", "limit", "sentence"),
    [
        (
            3,
            PYTORCH,
            2,
            "You asked for 3 GPUs; your limit is 2 for one server. Ask for 2 or fewer.",
        ),
        (5, PYTORCH, 8, "You asked for 5 GPUs; PyTorch allows 4. Ask for 4 or fewer."),
        (1, PLAIN, 8, "You asked for 1 GPU, but Plain Python runs without one. Ask for 0."),
        (1, PYTORCH, 0, "You asked for 1 GPU; your limit is 0 for one server. Ask for 0."),
        (1, PLAIN, 0, "You asked for 1 GPU; Plain Python allows 0. Ask for 0."),
    ],
)
def test_too_much_says_which_limit_and_what_would_fit(
    gpus: int, environment: Environment, limit: int, sentence: str
) -> None:
    with pytest.raises(TooMuchAsked) as caught:
        resolve(FormChoice(gpus=gpus), environment, limit)
    assert caught.value.message == sentence


def test_the_built_in_catalog_takes_what_the_spawner_has() -> None:
    only = Catalog.single(devices=DeviceLimits(default=1, max=1024)).environments[0]
    assert resolve(FormChoice(), only, limit=8) == Request(devices=1, environment="default")


# Session length.


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
def test_the_smaller_limit_holds_and_the_environments_own_usual(
    own: Any, general: Any, holds: Any
) -> None:
    assert combine(SessionHours(*own), SessionHours(*general)) == SessionHours(*holds)


def test_a_session_is_as_long_as_was_said_or_as_usual() -> None:
    limits = SessionHours(default=8, max=24)
    assert session_seconds(FormChoice(), limits, PYTORCH) == 8 * 3600
    assert session_seconds(FormChoice(hours=1.5), limits, PYTORCH) == 5400
    assert session_seconds(FormChoice(hours=24), limits, PYTORCH) == 24 * 3600
    assert session_seconds(FormChoice(), SessionHours(), PYTORCH) is None
    assert session_seconds(FormChoice(hours=0.25), SessionHours(), PYTORCH) == 900
    assert session_seconds(FormChoice(), SessionHours(0.0001, 0.0001), PYTORCH) == 1


def test_more_hours_than_allowed_say_whose_limit_it_is() -> None:
    slow = Environment(slug="slow", display_name="Slow", hours=SessionHours(max=12))
    with pytest.raises(TooMuchAsked) as caught:
        session_seconds(FormChoice(hours=12.5), SessionHours(8, 12), slow)
    assert caught.value.message == (
        "The field 'hours' asks for 12.5 hours; Slow allows 12 for one session. Write 12 or less."
    )
    with pytest.raises(TooMuchAsked, match="your limit is 4 for one session"):
        session_seconds(FormChoice(hours=12.5), SessionHours(4, 4), slow)
