"""What a server's page asks for every few seconds, as JSON."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ..web.schemas import (
    Answer,
    Count,
    DatedAnswer,
    FundsAnswer,
    Instant,
    LeaseAnswer,
    LeasedAnswer,
    Number,
    told,
)

WarningKind = Literal["lost", "sick", "idle", "session", "credits"]


class DeviceMinuteAnswer(Answer):
    at: Instant = told("since")
    use_percent: Number | None = told("use")
    used_bytes: Count | None


class DeviceNowAnswer(LeasedAnswer):
    use_percent: Number | None
    busy: bool | None
    used_bytes: Count | None
    error: str
    sharing: str = Field(description="What the session has of a shared device; else empty.")
    minutes: tuple[DeviceMinuteAnswer, ...]


class WarningAnswer(Answer):
    """What is to be told now, under a key that stays while it is the same warning."""

    kind: WarningKind
    key: str
    at: Instant | None = None
    snooze_minutes: Number = 0.0


class NowAnswer(DatedAnswer):
    """A running server, its account, its devices' last hour, and what comes."""

    page: str
    lease: LeaseAnswer
    account: FundsAnswer | None
    devices: tuple[DeviceNowAnswer, ...]
    warnings: tuple[WarningAnswer, ...]
