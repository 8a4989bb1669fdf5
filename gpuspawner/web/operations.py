"""Declarations of the REST API's operations, with the models of their bodies and answers."""

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
"""Descriptions of the errors that any operation may return, by HTTP status."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter in the path or in the query string."""

    name: str
    schema: Schema
    description: str
    where: str = "query"

    def as_json(self) -> Schema:
        """Return the parameter as OpenAPI."""
        required = {"required": True} if self.where == "path" else {}
        words = {"description": self.description, "schema": self.schema}
        return {"name": self.name, "in": self.where, **required, **words}


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of the REST API."""

    name: str
    path: str
    """The path below ``api/``, with parameter names in braces."""
    answer: Any
    """The model of the answer, or a union of the possible models."""
    query: tuple[Parameter, ...] = ()
    body: type[Body] | BodyOfChannels | None = None
    """The model of the body, or a function that makes it from the names of the hub's channels."""
    scope: str = ""
    """The scope that a service or a server needs for it."""
    summary: str = ""
    """The description. If empty, the docstring of the method or the handler is used."""

    @property
    def parameters(self) -> list[Parameter]:
        """The parameters of the path, then those of the query string."""
        names = re.findall(r"{(\w+)}", self.path)
        return [*(Parameter(name, *IN_PATH[name], "path") for name in names), *self.query]

    def body_for(self, channels: Collection[str]) -> type[BaseModel] | None:
        """Return the model of the body at a hub with these channels."""
        if self.body is None or isinstance(self.body, type):
            return self.body
        return self.body(channels)


class Action(NamedTuple):
    """One of several operations of a method, selected by the last part of the path."""

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
    """Declare the operation of a handler's method; the docstring describes it.

    The operation is named after the last part of its path, unless ``name`` is given.
    """
    name = name or path.rpartition("/")[2].strip("{}")
    return _declare(Operation(name, path, answer, query, body, scope))


def each_action(
    path: str, actions: Mapping[str, Action], answer: Any, name: str = "{}"
) -> Callable[[F], F]:
    """Declare one operation for each action of a handler's method."""
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
"""Schemas and descriptions of path parameters."""

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
