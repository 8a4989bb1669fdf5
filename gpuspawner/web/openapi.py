"""The OpenAPI document of the REST API, made of what its handlers declare, and the JSON Schema of
catalogs."""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema
from tornado import web

from .. import __version__
from ..catalog.parser import schema
from .api import APIHandler
from .base import POLICY, ServiceHandler
from .operations import ERRORS, Operation, Schema, operation
from .schemas import Body, ErrorAnswer


class SchemaHandler(web.RequestHandler):
    """It says what a catalog may hold, and nothing of this hub's own."""

    def initialize(self, context: Any) -> None:
        self.set_header("Content-Security-Policy", POLICY)

    def get(self) -> None:
        self.set_header("Content-Type", "application/schema+json")
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("Access-Control-Allow-Origin", "*")  # editors in a browser read it too
        self.set_header("Cache-Control", "public, max-age=3600")
        self.finish(json.dumps(schema()))


CATALOG_SCHEMA_HANDLERS: list[tuple[str, type[web.RequestHandler]]] = [
    (r"catalog\.schema\.json", SchemaHandler)
]


class _PlainSchema(GenerateJsonSchema):
    """Leaves out titles, which say the name again, and defaults, which say that it can be left
    out."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def default_schema(self, schema: Any) -> Schema:
        return self.generate_inner(schema["schema"])


def document(
    prefix: str, handlers: Iterable[type[web.RequestHandler]], channels: Collection[str] = ()
) -> dict[str, Any]:
    """The whole document of these handlers, for a service that lies below ``prefix`` and has
    these channels."""
    declared = list(declarations(handlers))
    schemas, components = _schemas([found for _, found, _ in declared], channels)
    paths: dict[str, dict[str, Any]] = {}
    for method, found, words in declared:
        paths.setdefault(f"/api/{found.path}", {})[method] = _described(found, words, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "gpuspawner",
            "version": __version__,
            "description": "GPUs shared fairly. Amounts are credits as decimal strings, times are "
            "ISO 8601 in UTC. Send a token of the Hub as `Authorization: token ...`.",
        },
        "servers": [{"url": prefix.rstrip("/") or "/"}],
        "security": [{"hub": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "hub": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "A token of the Hub, of a member or of a service.",
                }
            },
        },
    }


def declarations(
    handlers: Iterable[type[web.RequestHandler]],
) -> Iterator[tuple[str, Operation, str]]:
    """What the handlers declare: method, operation, and its words."""
    for handler in dict.fromkeys(handlers):
        for name in ("get", "post", "put"):
            method = getattr(handler, name)
            for found in getattr(method, "operations", ()):
                yield (
                    name,
                    found,
                    found.summary or inspect.cleandoc(method.__doc__ or handler.__doc__ or ""),
                )


def _schemas(
    found: Collection[Operation], channels: Collection[str]
) -> tuple[dict[str, Schema], dict[str, Schema]]:
    """The schemas of bodies and answers by the operation's name, and those that they refer to."""
    models: list[tuple[str, Any, TypeAdapter[Any]]] = [
        ("error", "serialization", TypeAdapter(ErrorAnswer))
    ]
    for some in found:
        models.append((f"{some.name} answer", "serialization", TypeAdapter(some.answer)))
        if (body := some.body_for(channels)) is not None:
            models.append((f"{some.name} body", "validation", TypeAdapter(body)))
    made, beside = TypeAdapter.json_schemas(
        models, ref_template="#/components/schemas/{model}", schema_generator=_PlainSchema
    )
    return {name: schema for (name, _), schema in made.items()}, beside["$defs"]


def _described(found: Operation, words: str, schemas: dict[str, Schema]) -> dict[str, Any]:
    """An operation as OpenAPI has it; the first paragraph of ``words`` is its summary."""

    def content(name: str) -> dict[str, Any]:
        return {"application/json": {"schema": schemas[name]}}

    summary, *more = (" ".join(part.split()) for part in words.replace("``", "`").split("\n\n"))
    if found.scope:
        more.append(f"A service or a server needs the scope `{found.scope}` for it.")
    told: dict[str, Any] = {"operationId": found.name, "summary": summary}
    if more:
        told["description"] = "\n\n".join(more)
    if found.parameters:
        told["parameters"] = [parameter.as_json() for parameter in found.parameters]
    if (body := found.body) is not None:
        optional = isinstance(body, type) and issubclass(body, Body) and body.is_optional()
        told["requestBody"] = {"required": not optional, "content": content(f"{found.name} body")}
    errors = {
        str(status): {"description": why, "content": content("error")}
        for status, why in ERRORS.items()
    }
    done = {"description": "Done.", "content": content(f"{found.name} answer")}
    told["responses"] = {"200": done, **errors}
    return told


class OpenAPIHandler(APIHandler):
    """This document.

    It says nothing of anybody, so whoever finds the service may read it.
    """

    async def prepare(self) -> None:
        """Nobody is asked who they are."""

    @operation("openapi.json", dict[str, Any], name="openapi")
    def get(self) -> None:
        settings = self.application.settings
        if "openapi" not in settings:
            context = self.context
            settings["openapi"] = document(context.prefix, settings["routed"], context.channels)
        self.finish(settings["openapi"])


OPENAPI_HANDLERS: list[tuple[str, type[ServiceHandler]]] = [(r"api/openapi\.json", OpenAPIHandler)]
