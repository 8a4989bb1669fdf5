"""The JSON Schema of catalogs, for editors: the one page that is open to everybody."""

from __future__ import annotations

import json
from typing import Any

from tornado import web

from ..catalog.schema import schema
from .base import POLICY


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


HANDLERS: list[tuple[str, type[web.RequestHandler]]] = [(r"catalog\.schema\.json", SchemaHandler)]
