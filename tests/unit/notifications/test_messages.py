"""The words of notices: values are filled in as they are. Nothing real."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import pytest
from jinja2 import UndefinedError

from gpuspawner.notifications.models import Notice, NoticeKind
from gpuspawner.notifications.service import compose

NOW = datetime(2026, 3, 2, 9, tzinfo=timezone.utc)


def ended(**values: Any) -> Notice:
    return compose("ticket_ended", NoticeKind.TICKET_ENDED, "ended:1", "ada", NOW, **values)


@pytest.mark.parametrize("reason", ["a < b & 'c'", "{{ now }} {% if %}", "two  spaces\nand a line"])
def test_message_values_are_inserted_verbatim(reason: str) -> None:
    body = f"Reason: {reason}. Start the server again to get a new place."
    assert ended(reason=reason).body == body


def test_message_with_a_missing_value_raises_an_error() -> None:
    with pytest.raises(UndefinedError, match="reason"):
        ended()


def test_the_facts_for_the_admins_command_have_the_same_fields_without_a_lease() -> None:
    assert ended(reason="an admin cancelled it").facts == {
        "event": "ticket_ended",
        "lease": None,
        "server": None,
        "environment": None,
        "gpus": [],
        "account": None,
        "balance": None,
        "rate_per_hour": None,
        "minutes": None,
        "ends_at": None,
        "stops_at": None,
        "reason": "an admin cancelled it",
    }
