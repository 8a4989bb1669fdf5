"""Many grants at once from a CSV file: shown line by line, then confirmed; all of it or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

from tornado import web

from ..broker.admin import LONGEST_REASON
from ..broker.bulk import Bulk
from ..errors import GPUSpawnerError, InvalidRequest
from .base import Handler
from .forms import FormPage

MOST = 1024 * 1024
"""Bytes of a file."""


class BulkPage(FormPage):
    """The form, and what it would do, and what it did; for admins."""

    @web.authenticated
    async def get(self) -> None:
        self.need_admin()
        self.show_form()

    def show_form(
        self,
        found: Bulk | None = None,
        refusal: GPUSpawnerError | None = None,
        typed: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Send the page; ``found`` is what the file would do, or did, ``typed`` what was sent."""
        if refusal or (found and found.problems):
            self.set_status(400)
        self.show(
            "bulk.html",
            user=self.user,
            admin=True,
            found=found,
            error=refusal.message if refusal else "",
            typed={"lines": "", "reason": "", "open": "", "again": "", **typed},
            longest=LONGEST_REASON,
            xsrf=self.xsrf,
        )

    @web.authenticated
    async def post(self) -> None:
        self.need_admin()
        typed = {name: self.field(name) for name in ("lines", "reason", "open", "again")}
        try:
            data = self._sent(typed["lines"])
            typed["lines"] = data.decode("utf-8-sig", errors="replace")
            found = await self.broker.run(
                partial(
                    self.broker.grant_file,
                    data,
                    actor=self.actor,
                    reason=typed["reason"],
                    dry_run=not self.confirmed,
                    open_accounts=bool(typed["open"]),
                    again=bool(typed["again"]),
                )
            )
        except GPUSpawnerError as refusal:
            self.show_form(refusal=refusal, typed=typed)
            return
        self.show_form(found, typed=typed)

    def _sent(self, lines: str) -> bytes:
        """The file, or what was typed in place of one. Raises InvalidRequest."""
        files = self.request.files.get("file", [])
        data = bytes(files[0]["body"]) if files and files[0]["body"] else lines.encode()
        if len(data) > MOST:
            raise InvalidRequest("The file has more than 1 MB: give it in parts.", field="file")
        if not data.strip():
            raise InvalidRequest("There is nothing in it: choose a file, or type lines.")
        return data


HANDLERS: list[tuple[str, type[Handler]]] = [("bulk", BulkPage)]
