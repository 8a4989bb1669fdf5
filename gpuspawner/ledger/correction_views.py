"""Pages and JSON of corrections (reversals, refunds) and of grants from a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from tornado import web

from ..core.errors import GPUSpawnerError, InvalidRequest, LedgerError, UnknownTransfer
from ..core.units import format_credits
from ..devices.service import LONGEST_REASON, checked_reason
from ..leases.models import Lease, LeaseState
from ..queue.views import refusals
from ..web import view_models
from ..web.api import ChangingAPI, amount, instant, lease
from ..web.base import ServiceHandler
from ..web.fields import amount_of, exact_amount, instant_of, key_of, of_type
from ..web.pages import FormPage, credit
from .grant_files import Problem
from .grants import Bulk
from .models import Transfer

DONE = {
    "reversed": "The transfer was undone by this one, its opposite.",
}


async def find_transfer(handler: ServiceHandler, transfer_id: str) -> Transfer:
    """One transfer. Raises HTTPError 404."""
    try:
        found: Transfer = await handler.broker.read(handler.broker.ledger.transfer, transfer_id)
    except InvalidRequest:
        raise web.HTTPError(404) from UnknownTransfer(transfer=transfer_id)
    except GPUSpawnerError as error:
        raise web.HTTPError(error.status_code) from error
    return found


class TransferPage(FormPage):
    """One transfer with its postings, and the form that undoes it; for admins."""

    @web.authenticated
    async def get(self, transfer_id: str) -> None:
        self.need_admin()
        await self.show_transfer(transfer_id)

    async def show_transfer(
        self, transfer_id: str, refusal: GPUSpawnerError | None = None, reason: str = ""
    ) -> None:
        """Send the page; ``reason`` is what a refused form had in it."""
        found = await find_transfer(self, transfer_id)
        if refusal:
            self.set_status(refusal.status_code)
        self.show(
            "transfer.html",
            user=self.user,
            admin=True,
            transfer=found,
            reversal=await self.read(self.broker.reports.reversal_of, found.id),
            done=DONE.get(self.get_query_argument("done", ""), ""),
            error=refusal.message if refusal else "",
            reason=reason,
            longest=LONGEST_REASON,
            xsrf=self.xsrf,
        )

    @web.authenticated
    async def post(self, transfer_id: str) -> None:
        self.need_admin()
        found = await find_transfer(self, transfer_id)
        reason = self.field("reason")
        try:
            checked = checked_reason(reason, needed=True)
            if not self.confirmed:
                self._ask(found, checked)
                return
            done = await self.broker.run(
                self.broker.ledger.reverse, found.id, actor=self.actor, reason=checked
            )
        except GPUSpawnerError as refusal:
            await self.show_transfer(found.id, refusal, reason[: 2 * LONGEST_REASON])
            return
        self.go(f"transfers/{done.id}?done=reversed")

    def _ask(self, found: Transfer, reason: str) -> None:
        facts = [
            (f"{posting.account} gets", credit(-posting.amount))
            for posting in found.postings
            if not posting.account.startswith("system:")
        ]
        self.ask(
            "Undo this transfer?",
            [("It was for", found.reason), *facts, ("Reason", reason)],
            action=f"transfers/{found.id}",
            button="Undo it",
            back=f"transfers/{found.id}",
            fields={"reason": reason},
            note="Its opposite is written beside it; both stay in the statement. Undo that one "
            "to have it back.",
            danger=True,
            here="accounts",
        )


class RefundPage(FormPage):
    """What a session cost given back, all of it or a part: shown first, then confirmed."""

    async def get(self, lease_id: str) -> None:
        self.go(f"leases/{lease_id}")

    @web.authenticated
    async def post(self, lease_id: str) -> None:
        self.need_admin()
        found: Lease = await self.read(self.broker.lease, lease_id)
        text = self.field("amount").strip()
        try:
            reason = checked_reason(self.field("reason"), needed=True)
            part = amount_of(text) if text else None
            if not self.confirmed:
                self._ask(found, part, reason)
                return
            work = partial(
                self.broker.ledger.refund,
                actor=self.actor,
                reason=reason,
                key=self.key,
            )
            await self.broker.run(work, lease_id, part)
        except LedgerError as refusal:
            raise web.HTTPError(409) from refusal
        except GPUSpawnerError as refusal:
            raise web.HTTPError(refusal.status_code) from refusal
        self.go(f"leases/{lease_id}?refunded=1")

    def _ask(self, found: Lease, part: int | None, reason: str) -> None:
        self.ask(
            "Give back what this session cost?" if part is None else "Give a part of it back?",
            [
                ("Session of", str(found.server)),
                ("To", found.account),
                ("Credits", "all that is left" if part is None else credit(part)),
                ("It cost", credit(found.charged)),
                ("Reason", reason),
            ],
            action=f"leases/{found.id}/refund",
            button="Give it back",
            back=f"leases/{found.id}",
            fields={
                "reason": reason,
                "amount": "" if part is None else format_credits(part, 6),
            },
            here="accounts",
        )


class TransferAPI(ChangingAPI):
    """One transfer, for admins."""

    @web.authenticated
    async def get(self, transfer_id: str) -> None:
        self.need_admin()
        found = await find_transfer(self, transfer_id)
        undone = await self.read(self.broker.reports.reversal_of, found.id)
        self.answer(transfer_json(found, undone))


class ReversalAPI(ChangingAPI):
    """Undo a transfer by its opposite: ``{"reason": "the wrong Ada"}``."""

    @web.authenticated
    async def post(self, transfer_id: str) -> None:
        self.need_admin()
        reason = needed_reason(self.sent("reason"))
        found = await find_transfer(self, transfer_id)
        done = await self.do(self.broker.ledger.reverse, found.id, reason=reason)
        self.answer(transfer_json(done, None))


class RefundAPI(ChangingAPI):
    """Give back what a session cost: ``{"reason": "the GPU was sick"}``; a part of it with
    ``"amount": "1.5"``. The same ``key`` is done once."""

    @web.authenticated
    async def post(self, lease_id: str) -> None:
        self.need_admin()
        sent = self.sent("amount", "reason", "key")
        reason = needed_reason(sent)
        with refusals():
            part = exact_amount(sent["amount"]) if sent.get("amount") is not None else None
            key = f"api:{self.actor}:{key_of(sent['key'])}" if "key" in sent else ""
        done = await self.do(self.broker.ledger.refund, lease_id, part, reason=reason, key=key)
        (told,) = view_models.lease_figures(self.broker, [done], self.broker.clock())
        self.answer(lease(told))


def refundable(found: Lease) -> bool:
    """Whether there is something to give back."""
    return found.state is LeaseState.ENDED and found.charged > 0


def transfer_json(found: Transfer, reversal: Transfer | None) -> dict[str, Any]:
    """A transfer as JSON."""
    return {
        "id": found.id,
        "at": instant(found.at),
        "kind": found.kind.value,
        "actor": found.actor,
        "reason": found.reason,
        "lease": found.lease_id,
        "postings": [
            {"account": posting.account, "amount": amount(posting.amount)}
            for posting in found.postings
        ],
        "reversed_by": reversal.id if reversal else None,
    }


def needed_reason(sent: dict[str, Any]) -> str:
    """The reason that was sent. Raises HTTPError 400."""
    with refusals():
        return checked_reason(sent["reason"], needed=True)


_TRANSFER = "([0-9a-f]{32})"

CORRECTION_HANDLERS: list[tuple[str, type[ServiceHandler]]] = [
    (f"transfers/{_TRANSFER}", TransferPage),
    ("leases/([0-9a-f]{1,64})/refund", RefundPage),
    (f"api/transfers/{_TRANSFER}", TransferAPI),
    (f"api/transfers/{_TRANSFER}/reversal", ReversalAPI),
    ("api/leases/([0-9a-f]{1,64})/refund", RefundAPI),
]


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
                    self.broker.bulk_grants.grant_file,
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
            self.broker.bulk_grants.grant_file,
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


BULK_GRANT_HANDLERS: list[tuple[str, type[ServiceHandler]]] = [
    ("bulk", BulkPage),
    ("api/grants", BulkAPI),
]
