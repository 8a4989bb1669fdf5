"""Corrections (reversals and refunds) and grants from a file, as pages and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from tornado import web

from ..core.errors import GPUSpawnerError, InvalidRequest, LedgerError, UnknownTransfer
from ..core.text import LONGEST_REASON
from ..core.units import format_credits
from ..leases.models import Lease, LeaseState
from ..web.api import ChangingAPI, Parameter, operation
from ..web.base import ServiceHandler
from ..web.pages import LONGEST_FILE, FormPage
from ..web.schemas import LeaseAnswer, ReasonBody
from .grant_files import Problem
from .grants import BulkGrantResult
from .models import Transfer
from .schemas import GrantsAnswer, GrantsBody, ProblemAnswer, RefundBody, TransferAnswer


async def find_transfer(handler: ServiceHandler, transfer_id: str) -> Transfer:
    """Return a transfer. Raises HTTPError 404 if there is none."""
    try:
        found: Transfer = await handler.services.read(handler.services.ledger.transfer, transfer_id)
    except InvalidRequest:
        raise web.HTTPError(404) from UnknownTransfer(transfer=transfer_id)
    except GPUSpawnerError as error:
        raise web.HTTPError(error.status_code) from error
    return found


class TransferPage(FormPage):
    """One transfer with its postings, and the form that reverses it, for admins."""

    @web.authenticated
    async def get(self, transfer_id: str) -> None:
        """Send the page."""
        self.need_admin()
        await self.show_transfer(transfer_id)

    async def show_transfer(
        self, transfer_id: str, refusal: GPUSpawnerError | None = None, reason: str = ""
    ) -> None:
        """Send the page; ``reason`` is the content of a refused form."""
        found = await find_transfer(self, transfer_id)
        self.show(
            "transfer.html",
            transfer=found,
            reversal=await self.read(self.services.reports.reversal_of, found.id),
            done=self.get_query_argument("done", ""),
            refusal=refusal,
            reason=reason,
            xsrf=self.xsrf,
        )

    @web.authenticated
    async def post(self, transfer_id: str) -> None:
        """Reverse the transfer, after a confirmation."""
        self.need_admin()
        found = await find_transfer(self, transfer_id)
        reason = self.field("reason")
        try:
            sent = self.typed(ReasonBody)
            if not self.confirmed:
                back, typed = f"transfers/{found.id}", {"reason": sent.reason}
                self.confirm(
                    "reversal", action=back, back=back, fields=typed, transfer=found, **typed
                )
                return
            done = await self.services.run(
                self.services.ledger.reverse, found.id, actor=self.actor, reason=sent.reason
            )
        except GPUSpawnerError as refusal:
            await self.show_transfer(found.id, refusal, reason[: 2 * LONGEST_REASON])
            return
        self.go(f"transfers/{done.id}?done=reversed")


class RefundPage(FormPage):
    """The form that refunds a session, fully or partly, for admins."""

    async def get(self, lease_id: str) -> None:
        """Redirect to the receipt."""
        self.go(f"leases/{lease_id}")

    @web.authenticated
    async def post(self, lease_id: str) -> None:
        """Refund the session, after a confirmation."""
        self.need_admin()
        found: Lease = await self.read(self.services.leases.get, lease_id)
        try:
            sent = self.typed(RefundBody)
            if not self.confirmed:
                self._ask(found, sent)
                return
            refund, told = self.services.ledger.refund, {"reason": sent.reason, "key": self.key}
            await self.services.run(refund, lease_id, sent.amount, actor=self.actor, **told)
        except LedgerError as refusal:
            raise web.HTTPError(409) from refusal
        except GPUSpawnerError as refusal:
            raise web.HTTPError(refusal.status_code) from refusal
        self.go(f"leases/{lease_id}?refunded=1")

    def _ask(self, found: Lease, sent: RefundBody) -> None:
        amount = "" if sent.amount is None else format_credits(sent.amount, 6)
        self.confirm(
            "refund",
            action=f"leases/{found.id}/refund",
            back=f"leases/{found.id}",
            fields={"reason": sent.reason, "amount": amount},
            lease=found,
            sent=sent,
        )


TRANSFER = Parameter("transfer", {"type": "string", "pattern": "^[0-9a-f]{32}$"}, "Its id.")


class TransferAPI(ChangingAPI):
    """One transfer as JSON."""

    @operation("transfers/{transfer}", TransferAnswer)
    @web.authenticated
    async def get(self, transfer_id: str) -> None:
        """Return one transfer, for admins."""
        self.need_admin()
        found = await find_transfer(self, transfer_id)
        undone = await self.read(self.services.reports.reversal_of, found.id)
        self.answer(TransferAnswer, found, reversed_by=undone.id if undone else None)


class ReversalAPI(ChangingAPI):
    """The API operation that reverses a transfer."""

    @operation("transfers/{transfer}/reversal", TransferAnswer, name="reverse", body=ReasonBody)
    @web.authenticated
    async def post(self, transfer_id: str) -> None:
        """Reverse a transfer once: ``{"reason": "the wrong Ada"}``."""
        self.need_admin()
        reason = self.sent(ReasonBody).reason
        found = await find_transfer(self, transfer_id)
        done = await self.do(self.services.ledger.reverse, found.id, reason=reason)
        self.answer(TransferAnswer, done, reversed_by=None)


class RefundAPI(ChangingAPI):
    """The API operation that refunds a session."""

    @operation("leases/{lease}/refund", LeaseAnswer, body=RefundBody)
    @web.authenticated
    async def post(self, lease_id: str) -> None:
        """Refund what a session cost: all that is left of it, or a part.

        ``{"amount": "1.5", "reason": "the GPU was sick"}``; the same ``key`` is done once.
        """
        self.need_admin()
        sent = self.sent(RefundBody)
        key = f"api:{self.actor}:{sent.key}" if sent.key else ""
        refund = self.services.ledger.refund
        done = await self.do(refund, lease_id, sent.amount, reason=sent.reason, key=key)
        await self.answer_lease(done)


def refundable(found: Lease) -> bool:
    """Return True if the session has ended and its cost can be refunded."""
    return found.state is LeaseState.ENDED and found.charged > 0


_TRANSFER = "([0-9a-f]{32})"

CORRECTION_HANDLERS: list[tuple[str, type[ServiceHandler]]] = [
    (f"transfers/{_TRANSFER}", TransferPage),
    ("leases/([0-9a-f]{1,64})/refund", RefundPage),
    (f"api/transfers/{_TRANSFER}", TransferAPI),
    (f"api/transfers/{_TRANSFER}/reversal", ReversalAPI),
    ("api/leases/([0-9a-f]{1,64})/refund", RefundAPI),
]


SHOWN = 10  # problems listed if a file is refused


class BulkPage(FormPage):
    """The form for grants from a file, with a preview and the result, for admins."""

    takes_files = True

    @web.authenticated
    async def get(self) -> None:
        """Send the empty form."""
        self.need_admin()
        self.show_form()

    def show_form(
        self,
        found: BulkGrantResult | None = None,
        refusal: GPUSpawnerError | None = None,
        typed: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Send the form; ``found`` is the preview or result of a file, ``typed`` the content."""
        if refusal or (found and found.problems):
            self.set_status(400)
        self.show(
            "bulk.html",
            found=found,
            error=refusal.message if refusal else "",
            typed={"lines": "", "reason": "", "open": "", "again": "", **typed},
            xsrf=self.xsrf,
        )

    @web.authenticated
    async def post(self) -> None:
        """Preview the grants, or make them if they are confirmed."""
        self.need_admin()
        typed = {name: self.field(name) for name in ("lines", "reason", "open", "again")}
        try:
            data = self.uploaded(typed["lines"])
            typed["lines"] = data.decode("utf-8-sig", errors="replace")
            found = await self.services.run(
                self.services.bulk_grants.grant_file,
                data,
                actor=self.actor,
                reason=typed["reason"],
                dry_run=not self.confirmed,
                open_accounts=bool(typed["open"]),
                again=bool(typed["again"]),
            )
        except GPUSpawnerError as refusal:
            self.show_form(refusal=refusal, typed=typed)
            return
        self.show_form(found, typed=typed)


class BulkAPI(ChangingAPI):
    """The API operation that makes grants from a CSV file."""

    takes_files = True

    @operation("grants", GrantsAnswer, name="grantMany", body=GrantsBody)
    @web.authenticated
    async def post(self) -> None:
        r"""Grant credits to many accounts: all or nothing, and the same file once; for admins.

        ``{"csv": "ada,25\nbob,25", "reason": "week 3", "dry_run": true}``
        """
        self.need_admin()
        sent = self.sent(GrantsBody, longest=2 * LONGEST_FILE)
        found: BulkGrantResult = await self.do(
            self.services.bulk_grants.grant_file,
            sent.csv.encode(),
            reason=sent.reason,
            dry_run=sent.dry_run,
            open_accounts=sent.open,
            again=sent.again,
            until=sent.until,
        )
        if found.problems and not sent.dry_run:
            raise web.HTTPError(409) from LedgerError(_told(found.problems))
        problems = [ProblemAnswer.of(some, line=some.number or None) for some in found.problems]
        self.answer(GrantsAnswer, found, problems=problems)


def _told(problems: Sequence[Problem]) -> str:
    more = len(problems) - SHOWN
    rest = [f"And {more} more; a dry run names all of them."] if more > 0 else []
    return " ".join(["Nothing was given.", *(str(p) for p in problems[:SHOWN]), *rest])


BULK_GRANT_HANDLERS: list[tuple[str, type[ServiceHandler]]] = [
    ("bulk", BulkPage),
    ("api/grants", BulkAPI),
]
