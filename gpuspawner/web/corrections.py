"""Corrections: a transfer undone by its opposite, what a session cost given back."""

from __future__ import annotations

from typing import Any

from tornado import web

from ..broker.admin import LONGEST_REASON, checked_reason
from ..errors import GPUSpawnerError, InvalidRequest, UnknownTransfer
from ..ledger.entries import Transfer
from ..model import Lease, LeaseState
from . import figures
from .api import amount, instant, lease
from .api_queue import ChangingAPI
from .base import Handler
from .forms import FormPage
from .pages import credit

DONE = {
    "reversed": "The transfer was undone by this one, its opposite.",
}


async def find_transfer(handler: Handler, transfer_id: str) -> Transfer:
    """One transfer. Raises HTTPError 404."""
    try:
        found: Transfer = await handler.broker.run(handler.broker.transfer, transfer_id)
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
            reversal=await self.read(self.broker.reversal_of, found.id),
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
                self.broker.reverse, found.id, actor=self.actor, reason=checked
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
    """A session's charges given back, all of them: shown first, then confirmed."""

    async def get(self, lease_id: str) -> None:
        self.go(f"leases/{lease_id}")

    @web.authenticated
    async def post(self, lease_id: str) -> None:
        self.need_admin()
        found: Lease = await self.read(self.broker.lease, lease_id)
        try:
            reason = checked_reason(self.field("reason"), needed=True)
            if not self.confirmed:
                self._ask(found, reason)
                return
            await self.broker.run(self.broker.refund, lease_id, actor=self.actor, reason=reason)
        except GPUSpawnerError as refusal:
            raise web.HTTPError(refusal.status_code) from refusal
        self.go(f"leases/{lease_id}?refunded=1")

    def _ask(self, found: Lease, reason: str) -> None:
        self.ask(
            "Give back what this session cost?",
            [
                ("Session of", str(found.server)),
                ("To", found.account),
                ("Credits", credit(found.charged)),
                ("Reason", reason),
            ],
            action=f"leases/{found.id}/refund",
            button="Give it back",
            back=f"leases/{found.id}",
            fields={"reason": reason},
            here="accounts",
        )


class TransferAPI(ChangingAPI):
    """One transfer, for admins."""

    @web.authenticated
    async def get(self, transfer_id: str) -> None:
        self.need_admin()
        found = await find_transfer(self, transfer_id)
        undone = await self.read(self.broker.reversal_of, found.id)
        self.answer(transfer_json(found, undone))


class ReversalAPI(ChangingAPI):
    """Undo a transfer by its opposite: ``{"reason": "the wrong Ada"}``."""

    @web.authenticated
    async def post(self, transfer_id: str) -> None:
        self.need_admin()
        reason = _reason(self)
        found = await find_transfer(self, transfer_id)
        try:
            done = await self.broker.run(
                self.broker.reverse, found.id, actor=self.actor, reason=reason
            )
        except GPUSpawnerError as error:
            raise web.HTTPError(_conflict(error)) from error
        self.answer(transfer_json(done, None))


class RefundAPI(ChangingAPI):
    """Give back what a session cost: ``{"reason": "the GPU was sick"}``."""

    @web.authenticated
    async def post(self, lease_id: str) -> None:
        self.need_admin()
        reason = _reason(self)
        try:
            done = await self.broker.run(
                self.broker.refund, lease_id, actor=self.actor, reason=reason
            )
        except GPUSpawnerError as error:
            raise web.HTTPError(_conflict(error)) from error
        (told,) = figures.lease_figures(self.broker, [done], self.broker.clock())
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


def _reason(handler: ChangingAPI) -> str:
    """The reason that was sent. Raises HTTPError 400."""
    try:
        return checked_reason(handler.sent("reason")["reason"], needed=True)
    except GPUSpawnerError as error:
        raise web.HTTPError(error.status_code) from error


def _conflict(error: GPUSpawnerError) -> int:
    """What was sent is in order; it cannot be done as things are."""
    return 409 if isinstance(error, InvalidRequest) else error.status_code


_TRANSFER = "([0-9a-f]{32})"

HANDLERS: list[tuple[str, type[Handler]]] = [
    (f"transfers/{_TRANSFER}", TransferPage),
    ("leases/([0-9a-f]{1,64})/refund", RefundPage),
    (f"api/transfers/{_TRANSFER}", TransferAPI),
    (f"api/transfers/{_TRANSFER}/reversal", ReversalAPI),
    ("api/leases/([0-9a-f]{1,64})/refund", RefundAPI),
]
