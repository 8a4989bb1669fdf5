"""What handlers declare of the REST API, and the bodies that are sent to it. Real: the handlers,
their paths and models; nothing is asked."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

import pytest
from pydantic import TypeAdapter

from gpuspawner.core.errors import InvalidRequest
from gpuspawner.core.text import checked_reason
from gpuspawner.ledger.schemas import GrantBody, RateBody, RefillBody
from gpuspawner.queue.schemas import BoostBody, MoveBody, PauseBody
from gpuspawner.storage.schemas import InvitationBody, NewFolderBody
from gpuspawner.web.app import ROUTES
from gpuspawner.web.openapi import declarations, document
from gpuspawner.web.schemas import Body, NeededReason, ReasonBody, WhyBody

HANDLERS = [handler for _, handler in ROUTES]
EXAMPLES = {
    "account": "member:ada",
    "device": "GPU-0",
    "environment": "pytorch-2",
    "file": "out/model.pt",
    "folder": "0" * 16,
    "lease": "ab12",
    "rate": "7",
    "refill": "ab12",
    "run": "train-0a1b",
    "schedule": "train-0a1b",
    "sweep": "train-0a1b",
    "ticket": "ab-12",
    "transfer": "0" * 32,
}
"""A value for each parameter of a path."""


# What is declared.


def test_operations_have_unique_names_and_reach_their_handlers() -> None:
    found = list(declarations(HANDLERS))
    for method, operation, words in found:
        address = "api/" + operation.path.format(**EXAMPLES)
        (handler,) = {handler for pattern, handler in ROUTES if re.fullmatch(pattern, address)}
        declared = [its.path for name, its, _ in declarations([handler]) if name == method]
        assert operation.path in declared and words, operation.path
        for parameter in operation.parameters:
            if parameter.where == "path" and "pattern" in parameter.schema:
                assert re.search(parameter.schema["pattern"], EXAMPLES[parameter.name])
    assert len({operation.name for _, operation, _ in found}) == len(found)


def test_each_api_handler_declares_its_operations() -> None:
    of_api = {handler for pattern, handler in ROUTES if pattern.startswith("api/")}
    assert {handler for handler in of_api if not list(declarations([handler]))} == set()


@pytest.mark.parametrize("channels", [[], ["mail", "chat"]])
def test_notice_schema_lists_the_configured_channels(channels: list[str]) -> None:
    made = document("/", HANDLERS, channels)
    body = made["paths"]["/api/notices/choices"]["put"]["requestBody"]
    name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    assert body["required"]
    assert list(made["components"]["schemas"][name]["properties"]) == channels


# Bodies.


@pytest.mark.parametrize(
    ("model", "sent", "sentence"),
    [
        (WhyBody, [], "Send one JSON object; its fields are reason."),
        (WhyBody, {"why": ""}, "There is no field 'why'; there are reason."),
        (WhyBody, {"reason": 5}, "The field 'reason' is text."),
        (WhyBody, {"reason": "x" * 301}, "The field 'reason' has 300 characters at most."),
        (WhyBody, {"reason": "\x00"}, "The reason has unreadable characters."),
        (ReasonBody, {}, "The reason is missing: "),
        (GrantBody, {"reason": "x"}, "The field 'amount' is not valid: write credits as text"),
        (GrantBody, {"amount": "1", "reason": "x", "key": ""}, "The field 'key' is not valid"),
        (GrantBody, {"amount": "1", "reason": "x", "key": "x y"}, "The field 'key' is not valid"),
        (GrantBody, {"amount": "1", "reason": "x", "until": "soon"}, "The field 'until' is 'soon'"),
        (GrantBody, {"amount": "1", "reason": "x", "until": 5}, "The field 'until' is '5'"),
        *(
            (
                GrantBody,
                {"amount": "1", "reason": "x", "until": day},
                f"The field 'until' is '{day}'",
            )
            for day in ("2999-01-01", "2999-02-30T00:00:00Z")
        ),
        *(
            (GrantBody, {"amount": amount, "reason": "x"}, f"The field 'amount' is {said}")
            for amount, said in ((5, "not valid"), ("NaN", "'NaN'"), ("0", "0: nothing would"))
        ),
        (RateBody, {"rate": "1", "slots": True}, "The field 'slots' is a whole number."),
        (RateBody, {"rate": "1", "from": ""}, "The field 'from' is ''"),
        (RateBody, {"from_": ""}, "There is no field 'from_'; there are rate, "),
        (RefillBody, {"mode": []}, "The field 'mode' is add or top_up."),
        (BoostBody, {}, "The field 'points' is missing."),
        (MoveBody, {}, "The field 'position' is missing."),
        (PauseBody, {"paused": 1}, "The field 'paused' is true or false."),
        (NewFolderBody, {"name": ""}, "The field 'name' is text, and is not empty."),
        (InvitationBody, {"member": "ada"}, "The field 'write' is true or false."),
    ],
)
def test_invalid_json_body_is_rejected_with_a_message(
    model: type[Body], sent: object, sentence: str
) -> None:
    whole = {"rule": "x", "amount": "1", "audience": [], "reason": "x"}
    sent = {**whole, **sent} if model is RefillBody and isinstance(sent, dict) else sent
    with pytest.raises(InvalidRequest) as refused:
        model.model_validate(sent)
    assert refused.value.message.startswith(sentence)


def test_grant_form_values_are_normalized() -> None:
    form = {"amount": " +12.50 ", "reason": " Week\n3 ", "until": "2027-07-01 09:00"}
    grant = GrantBody.from_form(lambda name: form.get(name, ""), "Europe/Vienna")
    assert (grant.amount, grant.reason, grant.key) == (12_500_000, "Week 3", "")
    assert grant.until is not None
    assert grant.until.isoformat() == "2027-07-01T07:00:00+00:00"


def test_empty_form_fields_get_their_defaults() -> None:
    form = {"rule": "FREQ=DAILY", "amount": "5", "audience": "everybody, group:a", "reason": "x"}
    planned = RefillBody.from_form(lambda name: form.get(name, ""), "UTC").planned()
    expected: dict[str, Any] = {"zone": "UTC", "cap": None, "keep": None, "key": ""}
    assert {name: planned[name] for name in expected} == expected
    assert planned["audience"] == ["everybody", "group:a"]


@pytest.mark.parametrize(
    ("model", "form", "sentence"),
    [
        (GrantBody, {}, "The field 'amount' is '': write credits as a decimal number"),
        (GrantBody, {"amount": "1"}, "The reason is missing: "),
        (RefillBody, {"amount": "1", "keep": "x"}, "The field 'keep' is 'x': write a whole number"),
        (MoveBody, {"position": "x"}, "The field 'position' is 'x': write a whole number."),
        (BoostBody, {}, "The field 'points' is '': write a number, such as 12.5."),
    ],
)
def test_invalid_form_is_rejected_with_a_message(
    model: type[Body], form: dict[str, str], sentence: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        model.from_form(lambda name: form.get(name, ""), "UTC")
    assert refused.value.message.startswith(sentence)


def test_schema_of_a_reason_accepts_what_the_service_accepts() -> None:
    """Patterns of a schema are JavaScript's, whose white space is not quite Python's."""
    written = TypeAdapter(NeededReason).json_schema()["pattern"]
    assert "\\s" not in written
    pattern = re.compile(written)
    for text in filter(lambda it: unicodedata.category(it) != "Cs", map(chr, range(0x10000))):
        try:
            accepted = bool(checked_reason(text, needed=True))
        except InvalidRequest:
            accepted = False
        assert bool(pattern.search(text)) == accepted, repr(text)
