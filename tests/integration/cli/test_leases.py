"""Leases from a shell: listed, released, stopped and extended by hand. Real: the command,
processes. Simulated: the devices."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from datetime import timedelta

from gpuspawner.core.processes import process_ref
from gpuspawner.leases.models import Lease, LeaseState, Request, Terms
from gpuspawner.notifications.models import NoticeKind
from gpuspawner.services import Services, utcnow
from tests.support.command import ADA, GRACE, Command, grant
from tests.support.sessions import told


def test_live_server_keeps_its_lease_unless_forced(
    cli: Command, services: Services, server: Callable[[Lease], subprocess.Popen[bytes]]
) -> None:
    lease = services.leases.grant(ADA, Request(devices=1, model="A100"), engine="local")
    services.leases.confirm(lease.id, process_ref(server(lease).pid))
    services.forward(hours=1)
    done = cli("release", lease.id, "--yes", code=1)
    assert "is alive." in done.stderr
    assert "use --force" in done.stderr
    assert services.leases.get(lease.id).state is LeaseState.RUNNING

    done = cli("release", lease.id, "--yes", "--force")
    assert "keep using the devices until the accounting service ends it" in done.stderr
    ended = services.leases.get(lease.id)
    assert ended.state is LeaseState.ENDED
    assert ended.end_reason == "released by hand by root (alive)"
    assert ended.charged > 3_600_000, "up to now: the server ran all the time"
    again = cli("release", lease.id, "--yes", code=1)
    assert "ended already" in again.stderr


def test_release_charges_a_gone_server_until_last_seen(cli: Command, services: Services) -> None:
    lease = grant(services, ADA, ref="999999999:1", devices=2, model="A100")
    services.forward(minutes=30)
    services.leases._mark_seen([lease.id], services.clock())
    services.forward(days=3)

    done = cli("release", lease.id[:8], answer="n\n", code=1)
    assert done.stderr.splitlines()[0] == (
        f"Lease {lease.id} of ada: 2x A100-80GB (0, 1), running since 2025-03-01 12:00:00 UTC."
    )
    assert "its process is gone" in done.stderr
    assert (
        "frees 2x A100-80GB (0, 1) for others and charges member:ada 3.60 credits in all, "
        "up to 2025-03-01 12:30:00 UTC (0.00 of them are charged already)." in done.stderr
    )
    assert "Nothing was changed." in done.stderr
    assert cli("release", lease.id, code=1).stderr.endswith("Nothing was changed.\n"), "no answer"
    assert services.leases.get(lease.id).state is LeaseState.RUNNING

    done = cli("release", lease.id[:8], answer="y\n")
    assert done.stdout == f"Lease {lease.id} ended: 3.60 credits charged in total.\n"
    assert services.leases.get(lease.id).charged == 3_600_000
    assert services.monitoring.overview().free == 3


def test_release_needs_force_if_the_server_may_live(cli: Command, services: Services) -> None:
    docker = grant(services, ADA, engine="docker", ref="c0ffee", devices=1)
    done = cli("release", docker.id, "--yes", code=1, DOCKER_HOST="unix:///nowhere.sock")
    assert "the Docker Engine is not responding" in done.stderr
    assert "is unknown" in done.stderr
    other = grant(services, GRACE, engine="slurm", devices=1)
    done = cli("release", other.id, "--yes", code=1)
    assert "cannot ask the engine 'slurm'" in done.stderr
    assert len(services.leases.open_leases()) == 2

    plain = cli.json("release", docker.id, "--yes", "--force", DOCKER_HOST="unix:///nowhere.sock")
    assert (plain["state"], plain["server_was"]) == ("ended", "unknown")
    assert [lease.id for lease in services.leases.open_leases()] == [other.id]

    lease = services.leases.grant(ADA, Request(devices=1), engine="local")
    done = cli("release", lease.id, "--yes", code=1)
    assert "the start may be under way" in done.stderr
    cli("release", lease.id, "--yes", "--force")
    assert services.leases.get(lease.id).charged == 0
    assert services.ledger.member("ada").available == 100_000_000


def test_stop_command_orders_the_end_and_notifies_the_member(
    cli: Command, services: Services
) -> None:
    lease, other = grant(services, ADA, devices=1), grant(services, GRACE)
    done = cli("stop", "ada", "--reason", "the machine gets a new fan").stdout
    assert f"Lease {lease.id} of ada is to end" in done
    ordered = services.leases.get(lease.id)
    assert (ordered.outcome, ordered.end_reason) == ("admin", "the machine gets a new fan")
    assert [x.id for x in services.sessions.due_sessions().stop] == [lease.id]
    (notice,) = told(services, "ada", NoticeKind.STOPPED)
    assert notice.title == "Your server was stopped by an admin"
    assert notice.body.startswith("Reason: the machine gets a new fan. Your files are")
    (change,) = services.audit.trail()
    assert (change.actor, change.action) == ("cli:root", "stop")
    again = cli("stop", lease.id[:6], "--reason", "another", code=1).stderr
    assert "is being stopped already (the machine gets a new fan)" in again
    other_name = cli("stop", "ada/night", "--reason", "a fan", code=1).stderr
    assert other_name.endswith("List the open ones with: gpuspawner leases. ada has ada.\n")
    assert cli.json("stop", "grace/night", "--reason", "a fan")["outcome"] == "admin"
    services.leases.release(other.id, ended_at=services.clock(), reason="stopped")
    assert "it has stopped already" in cli("stop", other.id, "--reason", "x", code=1).stderr


def test_leases_command_lists_open_and_ended_leases(cli: Command, services: Services) -> None:
    ended = grant(services, ADA, devices=2, model="A100", environment="pytorch")
    services.forward(minutes=30)
    services.leases.release(ended.id, ended_at=services.clock(), reason="stopped")
    lease = grant(services, GRACE, devices=1, model="T4", environment="base")
    services.forward(minutes=90)
    services.ledger.charge_all()

    printed = cli("leases").stdout
    assert "1 open lease" in printed.splitlines()
    assert re.search(
        rf"{lease.id} +grace/night +base +1x T4 \(2\) +running +2025-03-01 12:30:00 UTC "
        # The command's clock is the machine's: what is due until now is years of a server.
        r"+2025-03-01 12:30:00 UTC +1\.00 +\d{4,}\.\d\d +20\d\d-.* \(credits run out\)$",
        printed,
        re.MULTILINE,
    ), printed
    assert ended.id not in printed

    printed = cli("leases", "--all").stdout
    assert re.search(rf"^{ended.id} .* ended .* 7\.20 +3\.60 +2025-.* stopped$", printed, re.M)

    plain = cli.json("leases", "--all", "--member", "ada")
    assert [x["id"] for x in plain] == [ended.id]
    assert plain[0]["charged"] == "3.600000"
    assert plain[0]["rate"] == "7.200000"
    assert plain[0]["ended_at"] == "2025-03-01T12:30:00+00:00"
    assert [d["model"] for d in plain[0]["devices"]] == ["A100-80GB"] * 2

    assert [x["id"] for x in cli.json("leases", "--all", "--limit", "1")] == [lease.id]
    assert cli.json("leases", "--member", "ada") == []
    assert cli("leases", "--member", "bob").stdout == "No open leases of bob.\n"
    assert "2025-03-01 21:30:00 JST" in cli("leases", TZ="Asia/Tokyo").stdout


def test_extend_command_moves_the_session_end(cli: Command, services: Services) -> None:
    services.clock = lambda: utcnow() - timedelta(minutes=10)
    terms = Terms(seconds=3600, groups=frozenset({"guests"}))
    request = Request(devices=1, model="A100")
    lease = services.leases.confirm(
        services.leases.grant(ADA, request, engine="local", terms=terms).id
    )
    assert lease.ends_at is not None
    shown = cli("leases").stdout
    assert shown.splitlines()[0].split()[-1] == "ENDS"
    assert f"{lease.ends_at.astimezone():%H:%M:%S}" in shown
    plain = cli.json("leases")[0]
    assert (plain["ends_at"], plain["outcome"]) == (lease.ends_at.isoformat(), "")
    done = cli("extend", lease.id[:8])
    extended = services.leases.get(lease.id)
    assert extended.ends_at is not None and extended.ends_at > lease.ends_at
    assert f"The session of ada ends at {extended.ends_at.astimezone():%Y-%m-%d %H:%M:%S}" in (
        done.stdout
    )
    (change,) = services.audit.trail()
    assert change.action == "extend" and change.actor.startswith("cli:")

    endless = grant(services, GRACE, devices=1)
    services.leases.confirm(endless.id)
    assert "has no end: nothing changed" in cli("extend", endless.id).stdout
    services.sessions.stop(lease.id, actor="kim", reason="a new fan")
    refused = cli("extend", lease.id, code=1).stderr
    assert "cannot be extended: its server is being stopped" in refused
