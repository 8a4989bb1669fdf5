"""The REST API: one section for each route, from the OpenAPI document that the service builds."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from .page import Generated, anchor_of, plain, refer, table
from .schemas import limits_of, refs_of, rows_of, type_of


@cache
def document() -> dict[str, Any]:
    """Return the OpenAPI document of a service at its usual address."""
    from gpuspawner.web.app import ROUTES
    from gpuspawner.web.openapi import document

    return document("/services/gpu/", [handler for _, handler in ROUTES])


@cache
def scopes() -> dict[tuple[str, str], str]:
    """Return the scope that an operation names, by method and path."""
    from gpuspawner.web.app import ROUTES
    from gpuspawner.web.openapi import declarations

    handlers = [handler for _, handler in ROUTES]
    return {(how, f"/api/{found.path}"): found.scope for how, found, _ in declarations(handlers)}


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield path, method and operation, in the order of the document."""
    for path, methods in document()["paths"].items():
        for method, told in methods.items():
            yield path, method, told


def name_of(path: str, method: str) -> str:
    """Return the name of an operation in the reference: ``GET api/queue``."""
    return f"{method.upper()} {path.removeprefix('/')}"


def names() -> Iterator[str]:
    """Yield the name of every operation."""
    yield from (name_of(path, method) for path, method, _ in operations())


def group_of(path: str) -> str:
    """Return the first word of a path below ``/api/``."""
    return path.removeprefix("/api/").partition("/")[0]


class Routes(Generated):
    """``{routes} queue granting``: sections for the routes whose path begins with these words."""

    required_arguments = 1

    def _anchor(self, name: str) -> str:
        return anchor_of("schema", f"{self.env.docname.rpartition('/')[2]}-{name}")

    def _named(self, name: str) -> str:
        return f"[{name}](#{self._anchor(name)})"

    def markdown(self) -> Iterator[str]:
        """Yield the sections, then the models that they refer to."""
        groups = self.arguments[0].split()
        used: list[str] = []
        for path, method, told in operations():
            if group_of(path) in groups:
                yield from self._route(path, method, told, used)
        if used:
            yield from self._models(used)

    def _route(
        self, path: str, method: str, told: dict[str, Any], used: list[str]
    ) -> Iterator[str]:
        name = name_of(path, method)
        yield from self.heading(1, "route", name, f"`{name}`")
        yield from (plain(told["summary"]), "")
        yield from (plain(told.get("description", "")), "")
        if scope := scopes()[method, path]:
            yield from (f"Scope: {refer('scope', scope)}.", "")
        rows = (
            (
                f"`{each['name']}`",
                "path" if each["in"] == "path" else "query",
                ", ".join(filter(None, (type_of(each["schema"]), limits_of(each["schema"])))),
                plain(each["description"]),
            )
            for each in told.get("parameters", ())
        )
        yield from table(("Parameter", "In", "Type", "Meaning"), rows)
        if body := told.get("requestBody"):
            optional = "" if body["required"] else " (may be left out)"
            yield from self._content(f"Body{optional}", body, used)
        yield from self._content("Answer", told["responses"]["200"], used)

    def _content(self, word: str, held: dict[str, Any], used: list[str]) -> Iterator[str]:
        ((media, told),) = held["content"].items()
        if media != "application/json":
            yield from (f"{word}: `{media}`.", "")
            return
        schema = told["schema"]
        found = document()["components"]["schemas"]
        names = list(dict.fromkeys(refs_of(schema)))
        if word.startswith("Body") and len(names) == 1 and "$ref" in schema:
            yield f"{word}:"
            rows = rows_of(found[names[0]], self._named, sent=True)
            yield from table(("Field", "Type", "Meaning"), rows)
            names = list(dict.fromkeys(refs_of(found[names[0]])))
        elif "properties" in schema:
            yield f"{word}:"
            rows = rows_of(schema, self._named, sent=word.startswith("Body"))
            yield from table(("Field", "Type", "Meaning"), rows)
        else:
            yield from (f"{word}: {type_of(schema, self._named)}.", "")
        for name in names:
            _add(name, used)

    def _models(self, used: list[str]) -> Iterator[str]:
        found = document()["components"]["schemas"]
        yield from ("", "# What these routes send and answer", "")
        for name in sorted(used):
            schema = found[name]
            yield from ("", f"({self._anchor(name)})=", "", f"## `{name}`", "")
            yield from (plain(schema.get("description", "")), "")
            if "properties" in schema:
                yield from table(("Field", "Type", "Meaning"), rows_of(schema, self._named))
            else:
                yield from (f"Type: {type_of(schema, self._named)}.", "")


def _add(name: str, used: list[str]) -> None:
    """Add a model and every model that it refers to."""
    if name not in used:
        used.append(name)
        for each in refs_of(document()["components"]["schemas"][name]):
            _add(each, used)


class RouteTable(Generated):
    """``{route-table}``: every route in one table."""

    def markdown(self) -> Iterator[str]:
        """Yield the table."""
        rows = []
        for path, method, told in operations():
            name = name_of(path, method)
            rows.append((refer("route", name), plain(told["summary"])))
        yield from table(("Route", "What it does"), rows)


class RouteErrors(Generated):
    """``{route-errors}``: the errors that any route may answer."""

    def markdown(self) -> Iterator[str]:
        """Yield the table of the statuses, and the fields of the answer."""
        from gpuspawner.web.api import ERRORS

        yield from table(("Status", "Meaning"), ((f"{k}", plain(v)) for k, v in ERRORS.items()))
        schema = document()["components"]["schemas"]["ErrorAnswer"]
        yield "The body of each is a JSON object:"
        yield from table(("Field", "Type", "Meaning"), rows_of(schema))
