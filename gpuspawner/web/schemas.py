"""What the bodies and answers of the REST API are made of.

A model checks the fields, writes them as JSON and describes them in the OpenAPI document. Amounts
are decimal strings of credits, times are ISO 8601 in UTC.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    AliasPath,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)

from ..core.errors import InvalidRequest
from ..core.text import LONGEST_REASON, checked_reason
from ..core.units import format_credits
from ..leases.models import EndReason, LeaseState
from .fields import (
    EXACT,
    INSTANT,
    amount_of,
    date_of,
    exact_amount,
    instant_of,
    invalid,
    key_of,
    of_type,
)

A = TypeVar("A", bound="Answer")
B = TypeVar("B", bound="Body")


def amount(micro: int) -> str:
    """Microcredits as credits, exactly."""
    return format_credits(micro, 6)


def instant(moment: datetime | None) -> str | None:
    """ISO 8601 in UTC."""
    if moment is None:
        return None
    return moment.astimezone(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def described(description: str = "", kind: str = "string", **more: Any) -> WithJsonSchema:
    """How a field is described, in place of what its type would say."""
    words = {"description": description} if description else {}
    return WithJsonSchema({"type": kind, **words, **more})


# Fields of answers.

_SIX_DECIMALS = described(
    "Credits, exactly.", pattern=r"^-?[0-9]+\.[0-9]{6}$", examples=["12.500000"]
)
Amount = Annotated[int, PlainSerializer(amount), _SIX_DECIMALS]
"""Microcredits."""

Instant = Annotated[datetime, PlainSerializer(instant), described(format="date-time", pattern="Z$")]
Count = Annotated[int, described(kind="integer", minimum=0)]
Number = Annotated[int | float, described(kind="number")]
"""As it comes: a whole number stays one."""
Seconds = Annotated[Count, BeforeValidator(lambda length: int(length.total_seconds()))]
"""Of a length of time, rounded down."""


class _Joined:
    """An object with fields that it does not have itself."""

    def __init__(self, found: object, more: dict[str, Any]) -> None:
        self.__dict__.update(more)
        self._found = found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._found, name)


class Answer(BaseModel):
    """What is answered as JSON. Its fields are read from attributes, see :func:`told`."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        from_attributes=True,
        populate_by_name=True,
        json_schema_serialization_defaults_required=True,
    )

    @classmethod
    def of(cls: type[A], found: object = None, /, **more: Any) -> A:
        """Return the answer that tells of an object, and of ``more`` beside it."""
        return cls.model_validate(_Joined(found, more))

    def as_json(self) -> dict[str, Any]:
        """Return the answer as it is sent."""
        return self.model_dump(mode="json", by_alias=True)


def told(path: str, *default: Any, name: str | None = None, description: str | None = None) -> Any:
    """A field that is read by a path such as ``lease.server.user``.

    ``default`` is for where the path leads nowhere, as through None; ``name``: in the JSON.
    """
    return Field(
        default[0] if default else ...,
        validation_alias=AliasPath(*path.split(".")),
        serialization_alias=name,
        description=description,
    )


# Fields of bodies. Each refuses with a sentence that names it.


def checked(
    check: Callable[[Any, str], Any], typed: Callable[[str, str, str], Any] | None = None
) -> PlainValidator:
    """What is sent in a field is checked by a function of the value and the field's name alone.

    ``typed`` takes its place for what people type in a form, with the zone of their clock.
    """

    def by_name(value: Any, info: ValidationInfo) -> Any:
        field = str(info.field_name).rstrip("_")
        if typed is not None and info.context is not None:
            return typed(value, field, info.context)
        return check(value, field)

    return PlainValidator(by_name)


_UNREADABLE = r"\u0000-\u0008\u000e-\u001b\u007f-\u0084\u0086-\u009f"
"""Characters that no reason has; all white space in it becomes a space each."""
_SPACE = r"\t-\r\u001c-\u0020\u0085\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
"""White space as Python knows it: that of a schema's patterns is not quite the same."""


def _reason(value: Any, field: str, *, needed: bool = False) -> str:
    if not isinstance(value, str):
        raise invalid(field, "is text.")
    if len(value) > LONGEST_REASON:
        raise invalid(field, f"has {LONGEST_REASON} characters at most.")
    return checked_reason(value, needed=needed)


def _of(kind: type) -> PlainValidator:
    return checked(lambda value, field: of_type(value, kind, field))


def _typed_amount(text: str, field: str, _zone: str) -> int:
    return amount_of(text, field)


Reason = Annotated[
    str,
    checked(_reason, lambda text, *_: checked_reason(text)),
    described("Why.", maxLength=LONGEST_REASON, pattern=f"^[^{_UNREADABLE}]*$"),
]
NeededReason = Annotated[
    str,
    checked(partial(_reason, needed=True), lambda text, *_: checked_reason(text, needed=True)),
    described(
        "Why.",
        minLength=1,
        maxLength=LONGEST_REASON,
        pattern=f"^[^{_UNREADABLE}]*[^{_UNREADABLE}{_SPACE}][^{_UNREADABLE}]*$",
    ),
]
Written = Annotated[str, _of(str), described(pattern=r"^[^\u0000]*$")]
"""Text that can be kept."""
Whole = Annotated[int, _of(int), described(kind="integer")]
Flag = Annotated[bool, _of(bool), described(kind="boolean")]
GivenCredits = Annotated[
    int,
    checked(exact_amount, _typed_amount),
    described(
        "Credits with six decimals at most; below zero takes back, for admins.",
        pattern=f"^{EXACT}$",
        examples=["25", "-0.5"],
    ),
]
PartCredits = Annotated[
    int,
    checked(exact_amount, _typed_amount),
    described(
        "Credits with six decimals at most; above zero.",
        pattern=f"^{EXACT.removeprefix('-?')}$",
        examples=["1.5"],
    ),
]
Moment = Annotated[
    datetime,
    checked(instant_of, date_of),
    described(format="date-time", pattern=f"^{INSTANT}$", examples=["2027-07-01T00:00:00Z"]),
]
Key = Annotated[
    str,
    checked(key_of),
    described(
        "What is sent again with the same key is done once.", pattern="^[0-9A-Za-z_.:-]{1,100}$"
    ),
]


def written(longest: int, example: str, *default: str) -> Any:
    """A field of text. How long it may be is described, and checked by what keeps it."""
    value = default[0] if default else ...
    return Field(value, examples=[example], json_schema_extra={"maxLength": longest})


class Body(BaseModel):
    """What is sent as JSON. Validation raises InvalidRequest, with a sentence for who sent it.

    A field named for a word of Python's has an underscore behind it, and its name as alias.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    in_forms: ClassVar[dict[str, str]] = {}
    """Names of fields that have others in forms."""

    says_missing: ClassVar[frozenset[str]] = frozenset()
    """Fields that are refused as missing; others as what they are not."""

    @classmethod
    def from_form(cls: type[B], field: Callable[[str], str], zone: str) -> B:
        """Return what was typed; ``field`` gives the text of a field, empty when there is none."""
        sent = {
            name: text
            for name, its in cls.model_fields.items()
            if (text := field(cls.in_forms.get(name, name)).strip()) or its.is_required()
        }
        return cls.model_validate(sent, context=zone)

    @classmethod
    def is_optional(cls) -> bool:
        """Return True if nothing need be sent."""
        return not any(field.is_required() for field in cls.model_fields.values())

    @model_validator(mode="before")
    @classmethod
    def _has_its_fields(cls, sent: Any) -> dict[str, Any]:
        fields = {field.alias or name: field for name, field in cls.model_fields.items()}
        there_are = ", ".join(fields)
        if not isinstance(sent, dict):
            raise InvalidRequest(f"Send one JSON object; its fields are {there_are}.", field="")
        for name in sent.keys() - fields.keys():
            sentence = f"There is no field {name[:60]!r}; there are {there_are}."
            raise InvalidRequest(sentence, field=name)
        for name in cls.says_missing - sent.keys():
            raise invalid(name, "is missing.")
        absent = [name for name, field in fields.items() if field.is_required()]
        return {**{name: "" if name == "reason" else None for name in absent}, **sent}


class WhyBody(Body):
    """Why, for who wants to say it."""

    reason: Reason = ""


class ReasonBody(Body):
    """Why."""

    reason: NeededReason


# Answers that several handlers give.


class ErrorAnswer(Answer):
    """Why something was not done."""

    status: int
    error: str = Field(description="A short, stable word.")
    message: str = Field(description="What is wrong, and what to do.")


class DatedAnswer(Answer):
    """An answer that says of when it is."""

    as_of: Instant


class LeasedAnswer(Answer):
    uuid: str
    index: int
    model: str
    memory_bytes: Count
    slots: Count = Field(description="How many slots the device has: 1 if it is not shared.")
    held_slots: Count = Field(description="How many of them the lease holds.")
    part: Annotated[str, BeforeValidator(str)] = Field(
        description="How much of a GPU the device is: 1, or such as 1/7 for a MIG instance."
    )


class SessionEndAnswer(Answer):
    """When and why a running session ends by itself."""

    at: Instant
    reason: EndReason


class ResourceUseAnswer(Answer):
    """What a server or run used of CPU, memory, disk and network; null if never reported."""

    cpu_seconds: Number | None
    memory_bytes: Count | None = Field(description="When last measured.")
    memory_peak_bytes: Count | None
    memory_limit_bytes: Count | None = Field(
        description="The memory of the machine if the environment sets no limit."
    )
    disk_read_bytes: Count | None
    disk_written_bytes: Count | None
    network_received_bytes: Count | None
    network_sent_bytes: Count | None
    memory_kills: Count = Field(
        description="How often the system ended a program because memory was used up."
    )
    sampled_at: Instant | None


class LeaseAnswer(Answer):
    """A lease, and what it cost so far."""

    id: str = told("lease.id")
    user: str = told("lease.server.user")
    server: str = told("lease.server.name")
    account: str = told("lease.account")
    environment: str = told("lease.environment")
    state: LeaseState = told("lease.state")
    devices: tuple[LeasedAnswer, ...] = told("lease.devices")
    rate_per_hour: Amount = told("lease.rate")
    cost: Amount
    granted_at: Instant = told("lease.granted_at")
    started_at: Instant | None = told("lease.started_at")
    ended_at: Instant | None = told("lease.ended_at")
    end_reason: str = told("lease.end_reason")
    warned_at: Instant | None = told("lease.warned_at")
    stops_at: Instant | None
    ends_at: Instant | None = told("lease.ends_at")
    end: SessionEndAnswer | None
    claim_by: Instant | None = told("lease.claim_by")
    group: str = told("lease.group")
    outcome: str = told("lease.outcome")
    charged: Amount = told("lease.charged")
    refunded: Amount = told("lease.refunded")
    waived: Amount = told("lease.waived")
    usage: ResourceUseAnswer | None


class FundsAnswer(Answer):
    account: str = told("account.name")
    balance: Amount = told("account.balance")
    held: Amount = told("account.held")
    available: Amount = told("account.available")
    rate_per_hour: Amount = told("rate")
    lasts_seconds: Seconds | None = told("lasts")
    runs_dry_at: Instant | None = told("dry_at")


class EntryAnswer(Answer):
    """A line of a statement."""

    id: int
    transfer: str
    at: Instant
    kind: str
    actor: str
    reason: str
    amount: Amount
    balance: Amount
    lease: str | None = told("lease_id")


class ChangeAnswer(Answer):
    at: Instant
    actor: str
    action: str
    subject: str
    detail: str


class LeasesAnswer(DatedAnswer):
    leases: tuple[LeaseAnswer, ...]
    next: str | None


class MeAnswer(Answer):
    """All that is a member's own."""

    name: str
    admin: bool
    as_of: Instant
    account: FundsAnswer
    running: tuple[LeaseAnswer, ...]
    statement: tuple[EntryAnswer, ...]


class DeviceAnswer(Answer):
    """A device as everybody may see it."""

    uuid: str = told("view.device.uuid")
    index: int = told("view.device.index")
    model: str = told("view.device.model")
    memory_bytes: Count = told("view.device.memory_bytes")
    machine: str = told("view.machine")
    state: str = told("view.state")
    reserved_for: tuple[str, ...] = told(
        "view.device.reserved_for",
        description="The groups it is kept for; empty if it is open to all.",
    )
    lent: bool = told(
        "view.device.lent", description="Whether preemptible runs of others may use it."
    )
    rate_per_hour: Amount = told("rate")
    mine: bool


class FullDeviceAnswer(DeviceAnswer):
    """A device as admins see it."""

    detail: str
    lease: str | None = told("view.lease_id")
    user: str | None = told("lease.server.user", None)


class DevicesAnswer(Answer):
    """All devices, and what can be said of their driver."""

    source: str
    seen: bool
    error: str
    driver_version: str
    cuda_version: str
    total: Count
    free: Count
    devices: tuple[FullDeviceAnswer | DeviceAnswer, ...]
