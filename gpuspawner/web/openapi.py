"""The OpenAPI document, from what the handlers declare, and the JSON Schema of catalogs."""

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
from .api import ERRORS, APIHandler, Operation, Schema, operation
from .base import POLICY, ServiceHandler
from .schemas import Body, ErrorAnswer


class SchemaHandler(web.RequestHandler):
    """The JSON Schema of catalogs, which says nothing about this hub."""

    def initialize(self, context: Any) -> None:
        """Set the content security policy."""
        self.set_header("Content-Security-Policy", POLICY)

    def get(self) -> None:
        """Send the schema."""
        self.set_header("Content-Type", "application/schema+json")
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("Access-Control-Allow-Origin", "*")  # editors in a browser read it too
        self.set_header("Cache-Control", "public, max-age=3600")
        self.finish(json.dumps(schema()))


CATALOG_SCHEMA_HANDLERS: list[tuple[str, type[web.RequestHandler]]] = [
    (r"catalog\.schema\.json", SchemaHandler)
]


class _PlainSchema(GenerateJsonSchema):
    """A schema generator without titles, which repeat the names, and without defaults."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def default_schema(self, schema: Any) -> Schema:
        return self.generate_inner(schema["schema"])


def document(
    prefix: str, handlers: Iterable[type[web.RequestHandler]], channels: Collection[str] = ()
) -> dict[str, Any]:
    """Return the OpenAPI document for some handlers.

    ``prefix`` is the path of the service, ``channels`` are the names of its notification channels.
    """
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
    """Yield the method, the operation and its description for each declared operation."""
    for handler in dict.fromkeys(handlers):
        for name in ("get", "post", "put", "patch", "delete"):
            method = getattr(handler, name)
            for found in getattr(method, "operations", ()):
                words = inspect.cleandoc(method.__doc__ or handler.__doc__ or "")
                yield name, found, found.summary or words


def _schemas(
    found: Collection[Operation], channels: Collection[str]
) -> tuple[dict[str, Schema], dict[str, Schema]]:
    """Return the schemas of bodies and answers, and the schemas that they refer to.

    The first are keyed by the operation's name followed by ``body`` or ``answer``.
    """
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
    """Return an operation as OpenAPI; the first paragraph of ``words`` is its summary."""

    def content(name: str, media: str = "application/json") -> dict[str, Any]:
        return {media: {"schema": schemas[name]}}

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
    done = {"description": "Done.", "content": content(f"{found.name} answer", found.media)}
    told["responses"] = {"200": done, **errors}
    return told


class OpenAPIHandler(APIHandler):
    """The OpenAPI document. It contains no member's data, so everybody may read it."""

    async def prepare(self) -> None:
        """Skip authentication."""

    @operation("openapi.json", dict[str, Any], name="openapi")
    def get(self) -> None:
        """Return this document.

        It contains nothing about members and is open to everybody.
        """
        settings = self.application.settings
        if "openapi" not in settings:
            context = self.context
            settings["openapi"] = document(context.prefix, settings["routed"], context.channels)
        self.finish(settings["openapi"])


OPENAPI_HANDLERS: list[tuple[str, type[ServiceHandler]]] = [(r"api/openapi\.json", OpenAPIHandler)]
