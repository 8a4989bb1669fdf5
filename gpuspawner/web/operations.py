"""What can be done by the REST API: each handler declares it beside itself, with the models of its
body and its answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel

from .fields import LAST, MOST_LINES
from .schemas import Body

F = TypeVar("F", bound=Callable[..., Any])
Schema = dict[str, Any]
BodyOfChannels = Callable[[Collection[str]], type[BaseModel]]

ERRORS = {
    400: "A field is not valid; the sentence names it.",
    401: "You did not say who you are.",
    403: "You may not: it is somebody else's, or your token's scopes do not allow it.",
    404: "There is nothing of this name.",
    405: "Nothing can be done here in this way.",
    409: "It cannot be done as things are now.",
    429: "It was done a moment ago: wait a little.",
    503: "The database or the Hub does not answer just now.",
}
"""How any operation can be refused."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A part of the path, or a field after the question mark."""

    name: str
    schema: Schema
    description: str
    where: str = "query"

    def as_json(self) -> Schema:
        """Return the parameter as OpenAPI has it."""
        told: Schema = {"name": self.name, "in": self.where}
        if self.where == "path":
            told["required"] = True
        return {**told, "description": self.description, "schema": self.schema}


@dataclass(frozen=True, slots=True)
class Operation:
    """One thing that can be done."""

    name: str
    path: str
    """Below ``api/``, with the names of its parameters in braces."""
    answer: Any
    """A model, or several of which one is answered."""
    query: tuple[Parameter, ...] = ()
    body: type[Body] | BodyOfChannels | None = None
    """A model, or what makes one of the names of the hub's channels."""
    scope: str = ""
    """What opens it to a service or a server."""
    summary: str = ""
    """Empty: its method's docstring says it, or its handler's."""

    @property
    def parameters(self) -> list[Parameter]:
        """Those of the path, and those after the question mark."""
        names = re.findall(r"{(\w+)}", self.path)
        return [*(Parameter(name, *IN_PATH[name], "path") for name in names), *self.query]

    def body_for(self, channels: Collection[str]) -> type[BaseModel] | None:
        """Return the model of the body at a hub that has these channels."""
        if self.body is None or isinstance(self.body, type):
            return self.body
        return self.body(channels)


class Action(NamedTuple):
    """One of several operations that a method does, by the last part of the path."""

    summary: str
    body: type[Body] | None = None


def operation(
    path: str,
    answer: Any,
    *query: Parameter,
    name: str = "",
    body: type[Body] | BodyOfChannels | None = None,
    scope: str = "",
) -> Callable[[F], F]:
    """Declare what a handler's method does; the docstring says it in words.

    It is named as the last part of its path, or as ``name``.
    """
    name = name or path.rpartition("/")[2].strip("{}")
    return _declare(Operation(name, path, answer, query, body, scope))


def each_action(
    path: str, actions: Mapping[str, Action], answer: Any, name: str = "{}"
) -> Callable[[F], F]:
    """Declare what a handler's method does by each of some actions."""
    return _declare(
        *(
            Operation(
                name=name.format(action.replace("-", "")),
                path=f"{path}/{action}",
                answer=answer,
                body=body,
                summary=summary,
            )
            for action, (summary, body) in actions.items()
        )
    )


def _declare(*declared: Operation) -> Callable[[F], F]:
    def declare(method: F) -> F:
        method.operations = declared  # type: ignore[attr-defined]
        return method

    return declare


def _text(pattern: str) -> Schema:
    return {"type": "string", "pattern": pattern}


_HEX = _text("^[0-9a-f]{1,64}$")
_ID: Schema = {"type": "integer", "minimum": 1, "maximum": LAST}
_NEXT = "Of the next page: the last answer's `next`."

IN_PATH = {
    "account": (_text("^(member|group):[A-Za-z0-9_.@-]{1,60}$"), "`member:NAME` or `group:NAME`."),
    "device": (_text("^[0-9A-Za-z-]{1,100}$"), "Its UUID or index."),
    "folder": (_text("^[0-9a-f]{16}$"), "The folder's id."),
    "lease": (_HEX, "The lease's id."),
    "rate": ({"type": "integer", "minimum": 1, "maximum": 10**18 - 1}, "Its number."),
    "refill": (_text("^[0-9a-f]{1,32}$"), "Its id."),
    "ticket": (_text("^[0-9A-Za-z-]{1,64}$"), "Its id."),
    "transfer": (_text("^[0-9a-f]{32}$"), "Its id."),
}
"""Schemas and descriptions of parts of paths."""

LIMIT = Parameter(
    "limit",
    {"type": "integer", "minimum": 1, "maximum": MOST_LINES, "default": 50},
    "How many at the most.",
)
BEFORE = Parameter("before", _ID, _NEXT)
BEFORE_LEASE = Parameter("before", _HEX, _NEXT)
AFTER = Parameter("after", {**_ID, "minimum": 0}, _NEXT)
AFTER_NAME = Parameter("after", {"type": "string"}, _NEXT)
SEARCH = Parameter("search", {"type": "string", "maxLength": 200}, "Text in it, in any case.")

DAY: Schema = {"type": "string", "format": "date"}
FROM_DAY = Parameter("from", DAY, "The first day, of the hub's own zone.")

ALL = Parameter("all", {"enum": ["0", "1"]}, "1: everybody's, for admins.")
