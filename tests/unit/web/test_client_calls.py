"""The client against the OpenAPI document: what it calls, sends and reads. Real: both; nothing is
asked."""

from __future__ import annotations

import inspect
from dataclasses import fields, is_dataclass
from datetime import datetime
from decimal import Decimal
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from gpuspawner.client import (
    CALLS,
    CREATE_SCHEDULE,
    QUOTE_RUN,
    SUBMIT_RUN,
    SUBMIT_SWEEP,
    Call,
    RunCalls,
    ScheduleCalls,
    SweepCalls,
)
from gpuspawner.web.app import ROUTES
from gpuspawner.web.openapi import document

DOCUMENT = document("/", [handler for _, handler in ROUTES])
PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", Any: "anything"}
CREDITS = r"^-?[0-9]+\.[0-9]{6}$"


def operation(call: Call[Any]) -> dict[str, Any]:
    return dict(DOCUMENT["paths"][f"/api/{call.path}"][call.method.lower()])


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in schema:
        return dict(DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]])
    return schema


def shape_of(schema: dict[str, Any]) -> Any:
    """A schema in the terms of :func:`shape_of_type`."""
    schema = resolved(schema)
    if "anyOf" in schema:
        shapes = [shape_of(each) for each in schema["anyOf"]]
        (shape,) = [each for each in shapes if each != "null"]
        return "null", shape
    if schema.get("type") == "array":
        return [shape_of(schema["items"])]
    if "properties" in schema:
        return {name: shape_of(each) for name, each in schema["properties"].items()}
    if schema.get("pattern") == CREDITS:
        return "credits"
    return schema.get("format") or schema.get("type") or "anything"


def shape_of_type(found: Any) -> Any:
    if is_dataclass(found):
        types = get_type_hints(found)
        return {each.name: shape_of_type(types[each.name]) for each in fields(found)}
    if isinstance(found, UnionType):
        (shape,) = [shape_of_type(each) for each in get_args(found) if each is not NoneType]
        return "null", shape
    if get_origin(found) is tuple:
        return [shape_of_type(get_args(found)[0])]
    if get_origin(found) is dict:
        return "object"
    return {Decimal: "credits", datetime: "date-time"}.get(found) or PLAIN[found]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_client_calls_what_the_document_describes(call: Call[Any]) -> None:
    described = operation(call)
    assert described["operationId"] == call.name
    queried = [each["name"] for each in described.get("parameters", ()) if each["in"] == "query"]
    assert list(call.query) == queried


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_client_reads_every_field_of_an_answer(call: Call[Any]) -> None:
    content = operation(call)["responses"]["200"]["content"]["application/json"]
    answered = shape_of(content["schema"])
    read = shape_of_type(call.answer)
    unread = {"as_of", "account"} if "next" in read else {"as_of"}
    assert read == {name: each for name, each in answered.items() if name not in unread - set(read)}


@pytest.mark.parametrize(
    ("call", "method"),
    [
        (SUBMIT_RUN, RunCalls.submit),
        (SUBMIT_SWEEP, SweepCalls.submit),
        (QUOTE_RUN, RunCalls.quote),
        (CREATE_SCHEDULE, ScheduleCalls.create),
    ],
)
def test_call_takes_every_field_of_its_body(call: Call[Any], method: Any) -> None:
    content = operation(call)["requestBody"]["content"]["application/json"]
    taken = inspect.signature(method).parameters.keys() - {"self"}
    assert taken == resolved(content["schema"])["properties"].keys()
