"""Corrections: a transfer undone by its opposite, what a session cost given back."""

from __future__ import annotations

from functools import partial
from typing import Any

from tornado import web

from ..broker.admin import LONGEST_REASON, checked_reason
from ..errors import GPUSpawnerError, InvalidRequest, LedgerError, UnknownTransfer
from ..ledger.entries import Transfer
from ..model import Lease, LeaseState, format_credits
from . import figures
from .api import amount, instant, lease
from .api_queue import ChangingAPI, refusals
from .base import Handler
from .fields import amount_of, exact_amount, key_of
from .forms import FormPage
from .pages import credit

DONE = {
    "reversed": "The transfer was undone by this one, its opposite.",
}


async def find_transfer(handler: Handler, transfer_id: str) -> Transfer:
    """One transfer. Raises HTTPError 404."""
    try:
        found: Transfer = await handler.broker.read(handler.broker.transfer, transfer_id)
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
                self.broker.refund,
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
        undone = await self.read(self.broker.reversal_of, found.id)
        self.answer(transfer_json(found, undone))


class ReversalAPI(ChangingAPI):
    """Undo a transfer by its opposite: ``{"reason": "the wrong Ada"}``."""

    @web.authenticated
    async def post(self, transfer_id: str) -> None:
        self.need_admin()
        reason = needed_reason(self.sent("reason"))
        found = await find_transfer(self, transfer_id)
        done = await self.do(self.broker.reverse, found.id, reason=reason)
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
        done = await self.do(self.broker.refund, lease_id, part, reason=reason, key=key)
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


def needed_reason(sent: dict[str, Any]) -> str:
    """The reason that was sent. Raises HTTPError 400."""
    with refusals():
        return checked_reason(sent["reason"], needed=True)


_TRANSFER = "([0-9a-f]{32})"

HANDLERS: list[tuple[str, type[Handler]]] = [
    (f"transfers/{_TRANSFER}", TransferPage),
    ("leases/([0-9a-f]{1,64})/refund", RefundPage),
    (f"api/transfers/{_TRANSFER}", TransferAPI),
    (f"api/transfers/{_TRANSFER}/reversal", ReversalAPI),
    ("api/leases/([0-9a-f]{1,64})/refund", RefundAPI),
]
