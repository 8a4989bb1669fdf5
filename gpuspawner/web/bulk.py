"""Many grants at once from a CSV file: shown line by line, then confirmed; all of it or nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from tornado import web

from ..broker.admin import LONGEST_REASON, checked_reason
from ..broker.bulk import Bulk
from ..errors import GPUSpawnerError, InvalidRequest, LedgerError
from ..ledger.bulk import Problem
from .api import amount
from .api_queue import ChangingAPI, refusals
from .base import Handler
from .fields import instant_of, of_type
from .forms import FormPage

MOST = 1024 * 1024
"""Bytes of a file."""

SHOWN = 10
"""Problems that are told of a file that is not given."""


class BulkPage(FormPage):
    """The form, and what it would do, and what it did; for admins."""

    takes_files = True

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


class BulkAPI(ChangingAPI):
    """The same for scripts: ``{"csv": "ada,25\\nbob,25", "reason": "week 3", "dry_run": true}``."""

    takes_files = True

    @web.authenticated
    async def post(self) -> None:
        self.need_admin()
        sent = self.sent("csv", "reason", "dry_run", "open", "again", "until", longest=2 * MOST)
        with refusals():
            lines = of_type(sent.get("csv"), str, "csv")
            dry_run, open_, again = (
                of_type(sent.get(name, False), bool, name) for name in ("dry_run", "open", "again")
            )
            until = sent.get("until")
            ends = None if until is None else instant_of(until, "until")
            reason = checked_reason(sent["reason"])
        found: Bulk = await self.do(
            self.broker.grant_file,
            lines.encode(),
            reason=reason,
            dry_run=dry_run,
            open_accounts=open_,
            again=again,
            until=ends,
        )
        if found.problems and not dry_run:
            raise web.HTTPError(409) from LedgerError(_told(found.problems))
        self.answer(bulk_json(found))


def bulk_json(found: Bulk) -> dict[str, Any]:
    """What a file did, or would do, as JSON."""
    return {
        "done": found.done,
        "total": amount(found.total),
        "lines": [
            {
                "line": gift.row.number,
                "account": gift.row.account,
                "amount": amount(gift.row.amount),
                "before": amount(gift.before),
                "after": amount(gift.after),
                "reason": gift.row.reason,
                "opened": gift.opened,
            }
            for gift in found.gifts
        ],
        "problems": [{"line": p.number or None, "what": p.sentence} for p in found.problems],
    }


def _told(problems: Sequence[Problem]) -> str:
    """What is wrong, in a few sentences."""
    more = len(problems) - SHOWN
    rest = [f"And {more} more; a dry run names all of them."] if more > 0 else []
    return " ".join(["Nothing was given.", *(str(p) for p in problems[:SHOWN]), *rest])


HANDLERS: list[tuple[str, type[Handler]]] = [("bulk", BulkPage), ("api/grants", BulkAPI)]
