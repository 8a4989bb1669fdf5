"""An admin's stop from a shell. Real: the command as a process, SQLite and PostgreSQL. Simulated:
the devices."""

from __future__ import annotations

import pytest

from gpuspawner.notifications.models import NoticeKind
from gpuspawner.services import Broker
from tests.support.command import ADA, GRACE, Command, grant


def test_a_server_is_ordered_to_stop_for_a_reason(cli: Command, broker: Broker) -> None:
    lease, other = grant(broker, ADA, devices=1), grant(broker, GRACE)
    done = cli("stop", "ada", "--reason", "the machine gets a new fan").stdout
    assert f"Lease {lease.id} of ada is to end" in done
    ordered = broker.lease(lease.id)
    assert (ordered.outcome, ordered.end_reason) == ("admin", "the machine gets a new fan")
    assert [x.id for x in broker.due_sessions().stop] == [lease.id]
    (notice,) = [n for n in broker.notifications.notices_of("ada") if n.kind is NoticeKind.STOPPED]
    assert notice.title == "Your server is stopped: an admin stopped it"
    assert notice.body.startswith("the machine gets a new fan. Your files are")
    (change,) = broker.trail()
    assert (change.actor, change.action) == ("cli:root", "stop")
    again = cli("stop", lease.id[:6], "--reason", "another", code=1).stderr
    assert "is being stopped already (the machine gets a new fan)" in again
    assert cli.json("stop", "grace/night", "--reason", "a fan")["outcome"] == "admin"
    broker.release(other.id, ended_at=broker.clock(), reason="stopped")
    assert "it has stopped already" in cli("stop", other.id, "--reason", "x", code=1).stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["grace", "--reason", "x"], 1, "There is no lease 'grace'"),
        (["grace/day", "--reason", "x"], 1, "grace has grace/night."),
        (["nobody", "--reason", "x"], 1, "gpuspawner leases"),
        (["grace/night"], 2, "--reason"),
        (["grace/night", "--reason", " "], 2, "say it in words"),
        (["grace/night", "--reason", "x" * 301], 1, "300 is the most"),
    ],
)
def test_what_cannot_be_stopped(
    cli: Command, broker: Broker, arguments: list[str], code: int, words: str
) -> None:
    grant(broker, GRACE, devices=1)
    assert words in cli("stop", *arguments, code=code).stderr
    assert broker.due_sessions().stop == () and broker.trail() == []
