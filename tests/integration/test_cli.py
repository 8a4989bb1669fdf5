"""Real: the command as a process, SQLite and PostgreSQL, processes. Simulated: the devices."""

from __future__ import annotations

import glob
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from gpuspawner.broker import Broker
from gpuspawner.cli import main
from gpuspawner.engines.local import LEASE_VARIABLE, process_ref
from gpuspawner.model import Lease, LeaseState, Request, ServerRef
from gpuspawner.store import Store
from tests.support.processes import REPO, wait_for

FLEET = "simulated:2xA100-80GB,1xT4"
ADA = ServerRef("ada")
GRACE = ServerRef("grace", "night")


class Command:
    """``gpuspawner`` in a hub's working directory, on its database."""

    def __init__(self, folder: Path, database_url: str) -> None:
        self.folder = folder
        self.database_url = database_url
        self.environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPO), "TZ": "UTC"}
        self.environment |= {"HOME": str(folder), "LC_ALL": "C.UTF-8", "USER": "root"}
        (folder / "jupyterhub_config.py").write_text(
            "c = get_config()\n"
            f"c.Broker.database_url = {database_url!r}\n"
            f"c.Broker.device_source = {FLEET!r}\n"
            "c.Broker.gpu_rates = {'*': 1, 'A100': '3.6'}\n"
            "c.JupyterHub.services.append({'name': 'x'})\n"
        )

    def __call__(
        self, *arguments: str, code: int = 0, answer: str = "", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "gpuspawner", *arguments],
            cwd=self.folder,
            env=self.environment | environment,
            input=answer,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        assert done.returncode == code, done.stdout + done.stderr
        return done

    def json(self, *arguments: str, **kwargs: Any) -> Any:
        return json.loads(self(*arguments, "--json", **kwargs).stdout)


@pytest.fixture
def cli(tmp_path: Path, database_url: str) -> Command:
    return Command(tmp_path, database_url)


@pytest.fixture
def broker(database_url: str) -> Iterator[Broker]:
    """The hub's broker, whose clock the test sets."""
    broker = Broker(
        database_url=database_url,
        device_source=FLEET,
        gpu_rates={"*": 1, "A100": "3.6"},
    )
    now = [datetime(2025, 3, 1, 12, 0, tzinfo=timezone.utc)]
    broker.clock = lambda: now[0]
    broker.forward = lambda **step: now.append(now.pop() + timedelta(**step))
    broker.open_account("ada")
    broker.open_account("grace")
    yield broker
    Store.open(database_url).close()


def grant(
    broker: Broker, server: ServerRef, engine: str = "local", ref: str = "", **request: Any
) -> Lease:
    """A lease whose server is up."""
    lease = broker.acquire(server, Request(**request), engine=engine)
    return broker.confirm(lease.id, ref)


# Devices.


def test_devices_say_who_has_them(cli: Command, broker: Broker) -> None:
    lease = grant(broker, ADA, devices=1, model="A100")
    printed = cli("devices").stdout
    assert printed.splitlines()[0].split() == [
        *("INDEX", "MODEL", "MEMORY", "STATE", "UUID", "DETAIL"),
    ]
    row = next(line for line in printed.splitlines() if " leased " in line)
    assert row.split()[:5] == ["0", "A100-80GB", "80", "GB", "leased"]
    assert row.endswith(f"ada, lease {lease.id}")
    assert printed.splitlines()[-1] == "2 of 3 devices free (simulated)"

    plain = cli.json("devices")
    assert (plain["source"], plain["total"], plain["free"]) == ("simulated", 3, 2)
    first = plain["devices"][0]
    assert (first["uuid"], first["state"]) == (lease.uuids[0], "leased")
    assert (first["lease"], first["member"]) == (lease.id, "ada")
    assert [m["rate"] for m in plain["models"]] == ["3.600000", "1.000000"]


def test_devices_before_there_is_a_database(tmp_path: Path) -> None:
    cli = Command(tmp_path, f"sqlite:///{tmp_path}/not-yet.sqlite")
    done = cli("devices")
    assert "3 of 3 devices free" in done.stdout
    assert "what is leased is not known" in done.stderr
    assert not (tmp_path / "not-yet.sqlite").exists()


def test_a_device_source_with_a_mistake(cli: Command, broker: Broker, tmp_path: Path) -> None:
    grant(broker, ADA, devices=1)
    config = tmp_path / "jupyterhub_config.py"
    config.write_text(config.read_text().replace(FLEET, "simulated:0xT4"))
    assert "'0xT4' is not part of a simulated fleet" in cli("devices", code=2).stderr


def test_looking_changes_nothing_of_what_the_hub_saw(
    cli: Command, broker: Broker, tmp_path: Path
) -> None:
    broker.overview()
    with broker.store.read() as connection:
        before = connection.execute(sa.text("SELECT * FROM devices ORDER BY uuid")).all()
    config = tmp_path / "jupyterhub_config.py"
    text = config.read_text()
    config.write_text(text.replace(FLEET, "simulated:1xA100-80GB"))
    plain = cli.json("devices")
    assert [device["state"] for device in plain["devices"]] == ["free", "unknown", "unknown"]
    assert plain["devices"][1]["detail"] == "not there any more"
    config.write_text(text.replace(FLEET, "nvml"))
    assert cli.json("devices", code=0 if glob.glob("/dev/nvidia[0-9]*") else 1)
    with broker.store.read() as connection:
        after = connection.execute(sa.text("SELECT * FROM devices ORDER BY uuid")).all()
    assert after == before


# Leases.


def test_leases_open_and_ended(cli: Command, broker: Broker) -> None:
    ended = grant(broker, ADA, devices=2, model="A100", environment="pytorch")
    broker.forward(minutes=30)
    broker.release(ended.id, ended_at=broker.clock(), reason="stopped")
    lease = grant(broker, GRACE, devices=1, model="T4", environment="base")
    broker.forward(minutes=90)
    broker.charge_all()

    printed = cli("leases").stdout
    assert "1 open lease" in printed.splitlines()
    assert re.search(
        rf"{lease.id} +grace/night +base +1x T4 \(2\) +running +2025-03-01 12:30:00 UTC "
        r"+2025-03-01 12:30:00 UTC +1\.00 +1\.50$",
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


def test_local_times_carry_their_zone(cli: Command, broker: Broker) -> None:
    grant(broker, ADA, devices=1)
    printed = cli("leases", TZ="Asia/Tokyo").stdout
    assert "2025-03-01 21:00:00 JST" in printed


# Credits.


def test_grant_and_statement(cli: Command, broker: Broker) -> None:
    done = cli("grant", "ada", "12.5", "--reason", "for the paper", "--actor", "prof")
    assert done.stdout == (
        "Gave 12.50 credits to member:ada. The balance is 112.50 credits (was 100.00).\n"
    )
    done = cli("grant", "member:ada", "-2.000001", "--reason", "a slip")
    assert done.stdout.startswith("Took 2.00 credits from member:ada. The balance is 110.49")
    assert broker.member("ada").balance == 110_499_999

    plain = cli.json("statement", "ada")
    assert (plain["account"], plain["balance"]) == ("member:ada", "110.499999")
    kept = [(x["kind"], x["amount"], x["balance"], x["reason"]) for x in plain["lines"]]
    assert kept == [
        ("adjustment", "-2.000001", "110.499999", "a slip"),
        ("grant", "12.500000", "112.500000", "for the paper"),
        ("grant", "100.000000", "100.000000", "Opening grant"),
    ]
    assert plain["lines"][1]["actor"] == "prof"
    assert plain["lines"][0]["actor"] == "root", "who ran it"
    assert datetime.fromisoformat(plain["lines"][0]["at"]).utcoffset() == timedelta(0)

    printed = cli("statement", "ada", "--limit", "1").stdout.splitlines()
    assert printed[0] == "member:ada: 110.49 credits"
    assert re.search(r"UTC +adjustment +-2\.01 +110\.49 +root +- +a slip$", printed[3]), printed
    assert printed[-1] == "These are the newest 1 line; --limit shows more."


def test_the_actor_below_sudo_is_who_called_it(cli: Command, broker: Broker) -> None:
    cli("grant", "ada", "1", "--reason", "x", SUDO_USER="operator")
    assert broker.statement("member:ada")[0].actor == "operator"


def test_a_key_makes_a_grant_once(cli: Command, broker: Broker) -> None:
    again = ("grant", "ada", "5", "--reason", "March", "--key", "2025-03")
    assert cli.json(*again)["granted"] is True
    assert cli.json(*again)["granted"] is False
    assert broker.member("ada").balance == 105_000_000
    other = cli("grant", "ada", "6", "--reason", "March", "--key", "2025-03", code=1)
    assert "another amount or account" in other.stderr


def test_unknown_accounts_are_named_and_opened_when_asked(cli: Command, broker: Broker) -> None:
    done = cli("grant", "gracie", "5", "--reason", "x", code=1)
    assert done.stderr == (
        "gpuspawner: There is no account 'member:gracie'. Did you mean member:grace? "
        "A member's account opens at their first sign-in. Open it now with --open.\n"
    )
    done = cli("grant", "bob", "5", "--reason", "x", "--open")
    assert "Opened member:bob with its opening grant of 100.00 credits." in done.stderr
    assert broker.member("bob").balance == 105_000_000
    cli("grant", "bob", "5", "--reason", "x", "--open")
    assert broker.member("bob").balance == 110_000_000, "opened once only"
    cli("grant", "group:ml", "7", "--reason", "x", "--open")
    assert broker.account("group:ml").balance == 7_000_000
    assert "no account 'member:eve'" in cli("statement", "eve", code=1).stderr


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["grant", "ada", "1"], 2, "required: --reason"),
        (["grant", "ada", "1", "--reason", " "], 2, "it is empty"),
        (["grant", "ada", "nan", "--reason", "x"], 2, "'nan' is not an amount"),
        (["grant", "ada", "1e99", "--reason", "x"], 2, "more than 1,000,000,000 credits"),
        (["grant", "ada", "0.0000001", "--reason", "x"], 2, "more than six decimals"),
        (["grant", "ada", "0", "--reason", "x"], 2, "nothing would change"),
        (["grant", "system:grants", "1", "--reason", "x"], 1, "the ledger's own account"),
        (["grant", "group: ", "1", "--reason", "x"], 1, "no usable name"),
        (["statement", "ada", "--limit", "0"], 2, "write 1 or more"),
        (["release", "nothing"], 1, "There is no lease 'nothing'"),
        (["release", ""], 1, "There is no lease ''"),
        (["fly"], 2, "invalid choice: 'fly'"),
        ([], 2, "COMMAND"),
        (["leases", "-f", "nowhere.py"], 2, "There is no configuration file nowhere.py"),
        (["leases", "--database", "mysql://h/x"], 2, "is no supported database"),
        (["leases", "--database", "nonsense"], 2, "the database URL cannot be read"),
    ],
)
def test_mistakes_are_sentences_and_change_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    sentence: str,
) -> None:
    cli = Command(tmp_path, f"sqlite:///{tmp_path}/hub.sqlite")
    broker = Broker(database_url=cli.database_url, device_source=FLEET)
    broker.open_account("ada")
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == code
    printed = capsys.readouterr()
    assert (printed.out, sentence in printed.err) == ("", True), printed.err
    assert broker.member("ada").balance == 100_000_000
    assert [account.name for account in broker.accounts()] == ["member:ada"]
    broker.store.close()


def test_accounts(cli: Command, broker: Broker) -> None:
    grant(broker, ADA, devices=1, model="A100")
    printed = cli("accounts").stdout.splitlines()
    assert [line.split() for line in printed[:3]] == [
        ["ACCOUNT", "BALANCE", "HELD", "AVAILABLE"],
        ["member:ada", "100.00", "0.60", "99.40"],
        ["member:grace", "100.00", "0.00", "100.00"],
    ]
    assert printed[0].index("BALANCE") + len("BALANCE") == printed[1].index("100.00") + 6
    assert cli.json("accounts")[0] == {
        "account": "member:ada",
        "balance": "100.000000",
        "held": "0.600000",
        "available": "99.400000",
    }


def test_names_of_any_width_stay_aligned_and_move_no_cursor(cli: Command, broker: Broker) -> None:
    broker.open_account("学生" * 10)
    cli("grant", "ada", "1", "--reason", "red \x1b[31m and a\nnew line")
    lines = cli("accounts").stdout.splitlines()
    wide = next(line for line in lines if "学生" in line)
    assert wide.index("100.00") + 20 == lines[1].index("101.00"), "each of 20 is two wide"
    printed = cli("statement", "ada").stdout
    assert "\x1b" not in printed
    assert "red ?[31m and a?new line" in printed


# Release.


@pytest.fixture
def server() -> Iterator[Callable[[Lease], str]]:
    """Start a process that carries a lease, as GPULocalSpawner does; its engine_ref."""
    running: list[subprocess.Popen[bytes]] = []

    def start(lease: Lease) -> str:
        environment = {LEASE_VARIABLE: lease.id, "JUPYTERHUB_USER": lease.server.user}
        process = subprocess.Popen(
            ["sleep", "600"], env=os.environ | environment, start_new_session=True
        )
        running.append(process)
        wait_for(
            lambda: LEASE_VARIABLE.encode() in Path(f"/proc/{process.pid}/environ").read_bytes(),
            "the process to be sleep",
        )
        return process_ref(process.pid)

    yield start
    for process in running:
        process.kill()
        process.wait()


def test_a_live_server_keeps_its_lease_unless_forced(
    cli: Command, broker: Broker, server: Callable[[Lease], str]
) -> None:
    lease = broker.acquire(ADA, Request(devices=1, model="A100"), engine="local")
    broker.confirm(lease.id, server(lease))
    broker.forward(hours=1)
    done = cli("release", lease.id, "--yes", code=1)
    assert "is alive." in done.stderr
    assert "insist with --force" in done.stderr
    assert broker.lease(lease.id).state is LeaseState.RUNNING

    done = cli("release", lease.id, "--yes", "--force")
    assert "go on using the devices until the accounting service ends it" in done.stderr
    ended = broker.lease(lease.id)
    assert ended.state is LeaseState.ENDED
    assert ended.end_reason == "released by hand by root (alive)"
    assert ended.charged > 3_600_000, "up to now: the server ran all the time"
    again = cli("release", lease.id, "--yes", code=1)
    assert "ended already" in again.stderr


def test_a_server_that_is_gone_is_settled_up_to_its_last_sight(
    cli: Command, broker: Broker
) -> None:
    lease = grant(broker, ADA, ref="999999999:1", devices=2, model="A100")
    broker.forward(minutes=30)
    broker._mark_seen([lease.id], broker.clock())
    broker.forward(days=3)

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
    assert broker.lease(lease.id).state is LeaseState.RUNNING

    done = cli("release", lease.id[:8], answer="y\n")
    assert done.stdout == f"Lease {lease.id} ended: 3.60 credits charged in all.\n"
    assert broker.lease(lease.id).charged == 3_600_000
    assert broker.overview().free == 3


def test_an_engine_that_cannot_be_asked_needs_force(cli: Command, broker: Broker) -> None:
    docker = grant(broker, ADA, engine="docker", ref="c0ffee", devices=1)
    done = cli("release", docker.id, "--yes", code=1, DOCKER_HOST="unix:///nowhere.sock")
    assert "the Docker Engine does not answer" in done.stderr
    assert "is unknown" in done.stderr
    other = grant(broker, GRACE, engine="slurm", devices=1)
    done = cli("release", other.id, "--yes", code=1)
    assert "cannot ask the engine 'slurm'" in done.stderr
    assert len(broker.open_leases()) == 2

    plain = cli.json("release", docker.id, "--yes", "--force", DOCKER_HOST="unix:///nowhere.sock")
    assert (plain["state"], plain["server_was"]) == ("ended", "unknown")
    assert [lease.id for lease in broker.open_leases()] == [other.id]


def test_a_start_under_way_is_not_gone(cli: Command, broker: Broker) -> None:
    lease = broker.acquire(ADA, Request(devices=1), engine="local")
    done = cli("release", lease.id, "--yes", code=1)
    assert "the start may be under way" in done.stderr
    cli("release", lease.id, "--yes", "--force")
    assert broker.lease(lease.id).charged == 0
    assert broker.member("ada").available == 100_000_000


# Configuration, databases and errors.


def test_a_missing_sqlite_file_is_not_made(tmp_path: Path) -> None:
    cli = Command(tmp_path, f"sqlite:///{tmp_path}/mistyped.sqlite")
    for command in (["leases"], ["accounts"], ["grant", "ada", "1", "--reason", "x", "--open"]):
        assert f"There is no database at {tmp_path}/mistyped.sqlite" in cli(*command, code=1).stderr
    assert not (tmp_path / "mistyped.sqlite").exists()


def test_the_database_can_be_named_in_three_ways(
    cli: Command, broker: Broker, tmp_path: Path, database_url: str
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    other = Command(elsewhere, "sqlite:///not-there.sqlite")
    assert len(other.json("accounts", "-f", str(tmp_path / "jupyterhub_config.py"))) == 2
    assert len(other.json("accounts", "--database", database_url)) == 2
    (elsewhere / "jupyterhub_config.py").unlink()
    assert len(other.json("accounts", GPUSPAWNER_DATABASE_URL=database_url)) == 2


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("c.Broker.x = 1\nraise KeyError('SECRET_KEY')\n", "line 2, does not load: KeyError"),
        ("c.Broker.x = = 1\n", "does not load: SyntaxError"),
        ("import sys\nsys.exit('set the environment first')\n", "set the environment first"),
        ("c.Broker.refresh_seconds = 'soon'\n", "refresh_seconds"),
    ],
)
def test_a_configuration_that_does_not_load(tmp_path: Path, text: str, sentence: str) -> None:
    cli = Command(tmp_path, "sqlite:///x.sqlite")
    (tmp_path / "jupyterhub_config.py").write_text(text)
    assert sentence in cli("leases", code=2).stderr


@pytest.mark.parametrize(
    ("url", "command"),
    [
        ("postgresql+psycopg2://hub:hunter%402@127.0.0.1:1/hub", ["check", "--no-containers"]),
        ("postgresql+psycopg2://hub:hunter%402@127.0.0.1:1/hub", ["leases", "--debug"]),
        ("postgresql+psycopg2://hub:hunter@2@127.0.0.1:nonsense/hub", ["leases", "--debug"]),
        ("oracle://hub:hunter@2@127.0.0.1:1/hub", ["leases", "--debug"]),
        ("oracle://hub:hunter@2@127.0.0.1:1/hub", ["check", "--no-containers"]),
    ],
)
def test_a_password_is_never_shown(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    url: str,
    command: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*command, "--database", url]) in (1, 2)
    printed = "".join(capfd.readouterr())
    assert "hunter" not in printed
    assert "database" in printed


def test_a_database_that_is_gone(tmp_path: Path) -> None:
    cli = Command(tmp_path, "postgresql+psycopg2://hub@127.0.0.1:1/hub")
    done = cli("accounts", code=1)
    assert done.stderr.startswith("gpuspawner: The database does not answer.")
    assert "Connection refused" in done.stderr


def test_a_database_that_refuses_this_user(postgres: Any, tmp_path: Path) -> None:
    url = postgres.fresh_database()
    Broker(database_url=url, device_source=FLEET).open_account("ada")
    Store.open(url).close()
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text("DROP ROLE IF EXISTS stranger"))
        connection.execute(sa.text("CREATE ROLE stranger LOGIN"))
    engine.dispose()
    stranger = url.replace("postgres@", "stranger@")
    done = Command(tmp_path, stranger)("accounts", code=1)
    assert done.stderr.startswith("gpuspawner: The database refused: permission denied"), done


def test_a_reader_that_has_enough_is_no_error(cli: Command, broker: Broker) -> None:
    for number in range(300):
        broker.open_account(f"member-with-a-rather-long-name-{number}")
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} -m gpuspawner accounts | head -1"],
        cwd=cli.folder,
        env=cli.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("ACCOUNT")


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for command in ("check", "devices", "leases", "release", "grant", "statement", "accounts"):
        assert re.search(rf"^    {command}\b", text, re.MULTILINE)
        assert main([command, "--help"]) == 0
        assert "--config" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert re.fullmatch(r"gpuspawner \d+\.\d+\.\d+\S*\n", capsys.readouterr().out)
