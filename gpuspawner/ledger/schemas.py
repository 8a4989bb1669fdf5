"""Accounts, statements, receipts, corrections, rates and refills as JSON."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any, ClassVar

from pydantic import Field

from ..core.errors import InvalidRequest
from ..web.fields import of_type
from ..web.schemas import (
    Amount,
    Answer,
    Body,
    Count,
    DatedAnswer,
    EntryAnswer,
    Flag,
    FundsAnswer,
    GivenCredits,
    Instant,
    Key,
    LeaseAnswer,
    Moment,
    NeededReason,
    Number,
    PartCredits,
    Reason,
    Seconds,
    Whole,
    Written,
    checked,
    described,
    told,
    written,
)
from .refills import LONGEST_KEPT, Mode

# Accounts.


class AccountAnswer(FundsAnswer, DatedAnswer):
    """One account."""


class AccountsAnswer(DatedAnswer):
    accounts: tuple[FundsAnswer, ...]
    next: str | None


class StatementAnswer(Answer):
    account: str
    as_of: Instant
    entries: tuple[EntryAnswer, ...]
    next: int | None


class GrantBody(Body):
    """Credits for an account, or taken back from it."""

    amount: GivenCredits
    reason: NeededReason
    key: Key = ""
    until: Moment | None = Field(
        None, description="When they end: what is left then is taken back."
    )


class GrantedAnswer(Answer):
    granted: bool
    account: str
    amount: Amount
    key: str
    until: Instant | None
    balance: Amount


class SessionUseAnswer(Answer):
    """What a device did in a session; percents are null where nothing tells them, as of MIG."""

    uuid: str
    mean_percent: Number | None
    peak_percent: Count | None
    memory_peak_bytes: Count = told("memory_max")


class ItemAnswer(Answer):
    """A charge, above zero, or a refund, below; and the cost up to then."""

    id: int
    transfer: str
    at: Instant
    kind: str
    reason: str
    amount: Amount
    cost: Amount = told("balance")


class ReceiptAnswer(DatedAnswer):
    lease: LeaseAnswer
    use: tuple[SessionUseAnswer, ...]
    total: Amount
    count: Count
    items: tuple[ItemAnswer, ...]
    next: int | None


# Corrections, and grants to many.


class PostingAnswer(Answer):
    account: str
    amount: Amount


class TransferAnswer(Answer):
    id: str
    at: Instant
    kind: str = told("kind.value")
    actor: str
    reason: str
    lease: str | None = told("lease_id")
    postings: tuple[PostingAnswer, ...]
    reversed_by: str | None


class RefundBody(Body):
    """What is given back of what a session cost: all that is left of it, or a part."""

    amount: PartCredits | None = None
    reason: NeededReason
    key: Key = ""


class GrantsBody(Body):
    """Grants to many at once."""

    csv: Written = Field(
        description="Lines of member, amount and, if you like, reason; as in a file.",
        examples=["ada,2.5,week 3\nbob,2.5,week 3"],
    )
    reason: Reason = ""
    dry_run: Flag = Field(False, description="Only report what it would do.")
    open: Flag = Field(False, description="Open accounts that do not exist.")
    again: Flag = Field(False, description="Grant even if the same was granted before.")
    until: Moment | None = None


class GiftAnswer(Answer):
    line: Count = told("row.number")
    account: str = told("row.account")
    amount: Amount = told("row.amount")
    before: Amount
    after: Amount
    reason: str = told("row.reason")
    opened: bool


class ProblemAnswer(Answer):
    line: Count | None
    what: str = told("sentence")


class GrantsAnswer(Answer):
    done: bool
    total: Amount
    lines: tuple[GiftAnswer, ...] = told("gifts")
    problems: tuple[ProblemAnswer, ...]


# Rates.

Slots = Annotated[Whole, described(kind="integer", minimum=1, maximum=1024)]


class RateBody(Body):
    rate: Written = written(40, "2.5")
    model: Written = written(100, "A100", "")
    environment: Written = written(100, "course", "")
    slots: Slots | None = None
    hours: Written = written(100, "Mon-Fri 20-8, Sat, Sun", "")
    zone: Written = written(60, "Europe/Vienna", "")
    from_: Moment | None = Field(None, alias="from")
    reason: Reason = ""

    def wanted(self) -> dict[str, Any]:
        """Return what is asked for, as a rate is set; what was not sent is left out."""
        since = {} if self.from_ is None else {"since": self.from_.isoformat()}
        told = self.model_dump(exclude={"rate", "from_"}, exclude_unset=True)
        return {"amount": self.rate, **told, **since}


class RateAnswer(Answer):
    """A rate, as everybody sees it."""

    id: int | None
    rate_per_hour: Amount = told("amount")
    model: str
    environment: str
    slots: Count | None
    hours: str | None = told("hours.text", None)
    zone: str | None = told("hours.zone", None)
    since: Instant | None = told("since", name="from")


class FullRateAnswer(RateAnswer):
    """A rate, with who set it and why, for admins."""

    actor: str
    reason: str


class RatesAnswer(DatedAnswer):
    """The rates in the order in which they are matched."""

    next_change: Instant | None
    rates: tuple[FullRateAnswer | RateAnswer, ...]


# Refills.


def mode_of(text: object, field: str = "mode") -> Mode:
    """How a refill is given. Raises InvalidRequest."""
    try:
        return Mode(text)
    except ValueError:
        raise InvalidRequest(f"The field {field!r} is add or top_up.", field=field) from None


def _keep_days(value: Any, field: str) -> int:
    number: int = of_type(value, int, field)
    if not 0 < number <= LONGEST_KEPT.days:
        sentence = f"The field {field!r} is not valid: write from 1 to {LONGEST_KEPT.days}."
        raise InvalidRequest(sentence, field=field)
    return number


def _typed_keep(text: str, _field: str, _zone: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 6):
        sentence = f"The field 'keep' is {text[:60]!r}: write a whole number of days, or nothing."
        raise InvalidRequest(sentence, field="keep")
    return int(text)


def _typed_names(text: str, _field: str, _zone: str) -> list[str]:
    return text.replace(",", " ").split()


def _names(value: Any, field: str) -> list[str]:
    return [of_type(name, str, field) for name in of_type(value, list, field)]


RefillMode = Annotated[Mode, checked(mode_of), described(enum=[mode.value for mode in Mode])]
KeepDays = Annotated[
    int,
    checked(_keep_days, _typed_keep),
    described(kind="integer", minimum=1, maximum=LONGEST_KEPT.days),
]
Audience = Annotated[
    list[str],
    checked(_names, _typed_names),
    described(
        kind="array",
        items={"type": "string", "pattern": r"^[^\u0000]*$", "minLength": 1, "maxLength": 100},
        minItems=1,
        examples=[["members:ml101"], ["member:ada"]],
    ),
]


class RefillBody(Body):
    in_forms: ClassVar[dict[str, str]] = {"keep_days": "keep"}

    rule: Written = written(400, "FREQ=WEEKLY;BYDAY=MO;BYHOUR=6")
    zone: Written = written(60, "Europe/Vienna", "UTC")
    from_: Moment | None = Field(None, alias="from")
    mode: RefillMode = Mode.ADD
    amount: PartCredits
    cap: PartCredits | None = None
    keep_days: KeepDays | None = None
    audience: Audience
    reason: NeededReason
    key: Key = ""
    dry_run: Flag = False

    def planned(self) -> dict[str, Any]:
        """Return what is asked for, as a refill is planned."""
        named = ("rule", "zone", "mode", "amount", "cap", "audience", "reason")
        keep = None if self.keep_days is None else timedelta(days=self.keep_days)
        key = f"api:{self.key}" if self.key else ""
        told = {name: getattr(self, name) for name in named}
        return {**told, "starts_at": self.from_, "keep": keep, "key": key}


class RefillAnswer(Answer):
    id: str
    rule: str = told("recurrence.rule")
    zone: str = told("recurrence.zone")
    starts_at: Instant = told("recurrence.starts_at")
    mode: Mode
    amount: Amount
    cap: Amount | None
    keep_seconds: Seconds | None = told("keep")
    audience: tuple[str, ...]
    reason: str
    made_at: Instant
    made_by: str
    next_at: Instant | None


class RefillGiftAnswer(Answer):
    account: str = told("name")
    balance: Amount
    amount: Amount


class FullRefillAnswer(RefillAnswer):
    """A refill, when it comes, and what the first time would give now."""

    made: bool = Field(description="Whether there is one now.")
    comes_at: tuple[Instant, ...]
    gifts: tuple[RefillGiftAnswer, ...]


class RefillsAnswer(DatedAnswer):
    refills: tuple[RefillAnswer, ...]
