"""Mistakes of who types: each is a sentence and an exit code, and changes nothing. Real: the
commands, in this process; SQLite. Simulated: the devices."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuspawner.cli.app import main
from gpuspawner.leases.models import Request, ServerRef, Terms
from gpuspawner.services import Services
from tests.support.brokers import make_services
from tests.support.command import ADA, FLEET, GRACE, Command, grant

REASON = ("--reason", "x")
ONCE_A_DAY = ("FREQ=DAILY", "1", *REASON)
MISTAKES: list[tuple[str, tuple[str, ...], int, str]] = [
    # Commands and options.
    ("fly", (), 2, "No such command 'fly'"),
    ("quueue", (), 2, "Did you mean 'queue'?"),
    ("", (), 2, "COMMAND"),
    ("leases", REASON, 2, "No such option '--reason'"),
    ("leases", ("-f", "nowhere.py"), 2, "There is no configuration file nowhere.py"),
    ("leases", ("--database", "mysql://h/x"), 2, "is not a supported database"),
    ("leases", ("--database", "nonsense"), 2, "the database URL cannot be read"),
    # Credits.
    ("grant ada 1", (), 2, "--reason TEXT is missing"),
    ("grant ada 1", ("--reason", " "), 2, "it is empty"),
    ("grant ada nan", REASON, 2, "'nan' is not an amount"),
    ("grant ada 1,5", REASON, 2, "1,5"),
    ("grant ada 1e99", REASON, 2, "more than 1,000,000,000 credits"),
    ("grant ada 0.0000001", REASON, 2, "more than six decimals"),
    ("grant ada 0", REASON, 2, "nothing would change"),
    ("grant system:grants 1", REASON, 1, "the ledger's own account"),
    ("grant", ("group: ", "1", *REASON), 1, "no usable name"),
    ("grant ada 5 --until soon", REASON, 1, "'soon' is not a date"),
    ("grant ada 5 --until 2020-01-01", REASON, 1, "which is in the past"),
    ("grant ada", REASON, 2, "AMOUNT is missing"),
    ("grant", (), 2, "ACCOUNT is missing"),
    ("grant --file /nowhere.csv", REASON, 1, "/nowhere.csv cannot be read: No such"),
    ("grant --file /", REASON, 1, "/ cannot be read: Is a directory"),
    ("grant ada 5 --file x.csv", (), 2, "leave out ACCOUNT, AMOUNT"),
    ("grant ada 5 --dry-run", REASON, 2, "are for --file FILE"),
    ("statement ada --limit 0", (), 2, "write 1 or more"),
    ("statement eve", (), 1, "no account 'member:eve'"),
    ("refund nothing", REASON, 1, "leases --all"),
    ("reverse zz", REASON, 1, "no transfer that begins"),
    ("payer ada group:labs", (), 1, "no account 'group:labs'"),
    ("payer ada grace", (), 1, "cannot pay for ada"),
    # Refills.
    ("refills add", ("FREQ=SECONDLY", "1", *REASON), 1, "comes too often"),
    ("refills add", ("every day", "1", *REASON), 1, "not a recurrence rule"),
    ("refills add", ("FREQ=DAILY", "1,5", *REASON), 2, "1,5"),
    ("refills add", (*ONCE_A_DAY, "--zone", "Mars"), 1, "Mars"),
    ("refills add", (*ONCE_A_DAY, "--for", "all"), 1, "is not an audience"),
    ("refills add", (*ONCE_A_DAY, "--keep-days", "0"), 2, "not a number of days"),
    ("refills add", (*ONCE_A_DAY, "--from", "soon"), 1, "not a date"),
    ("refills remove zzz", (), 1, "no refill 'zzz'"),
    ("refills preview zzz", (), 1, "`gpuspawner refills` lists them"),
    # Rates.
    ("rates set A100 1,5", (), 1, "The field 'rate' is not valid: '1,5'. Write credits per GPU-ho"),
    ("rates set * 1 --hours 25-3", (), 1, "The field 'hours' is not valid: '25-3'"),
    (
        "rates set * 1 --zone Mars",
        (),
        1,
        "The field 'zone' is not valid: 'Mars' is not a time zone",
    ),
    ("rates set * 1 --from 2020-01-01", (), 1, "cannot start at 2020-01-01 00:00 UTC: that is"),
    (
        "rates set * 1 --slots 0",
        (),
        1,
        "The field 'slots' is not valid: 0 is not a number of slots",
    ),
    ("rates remove 7", (), 1, "There is no rate 7 that an admin set"),
    ("rates remove last", (), 2, "is not the number of a rate"),
    # Leases and sessions.
    ("release nothing", (), 1, "There is no lease 'nothing'"),
    ("release", ("",), 1, "There is no lease ''"),
    ("extend nothing", (), 1, "There is no lease 'nothing'"),
    ("stop grace", REASON, 1, "There is no lease 'grace'"),
    ("stop grace/day", REASON, 1, "grace has grace/night."),
    ("stop nobody", REASON, 1, "gpuspawner leases"),
    ("stop grace/night", (), 2, "--reason"),
    ("stop grace/night", ("--reason", " "), 2, "say it in words"),
    ("stop grace/night", ("--reason", "x" * 301), 1, "300 is the most"),
    # The line.
    ("queue move bob", (), 2, "POSITION"),
    *(
        ("queue move bob", (text,), 2, "is no position")
        for text in ("0", "1.5", "9" * 400, "first")
    ),
    ("queue boost bob lots", (), 2, "'lots' is not a number of points"),
    ("queue boost bob nan", (), 1, "nan is not a number of points"),
    ("queue boost bob 1e9", (), 1, "is not a number of points"),
    ("queue boost bob 1", ("--reason", "x" * 301), 1, "301 characters"),
    ("queue cancel bob", (), 2, "Missing option '--reason'"),
    ("queue cancel bob", ("--reason", " "), 2, "it is empty"),
    ("queue cancel nobody", REASON, 1, "No ticket 'nobody' waits in the queue"),
    ("queue cancel", ("", *REASON), 1, "No ticket '' waits in the queue"),
    ("queue --why bob bob", (), 1, "Both are the same ticket"),
    ("queue --why bob", (), 2, "requires 2 arguments"),
    ("queue fly bob", (), 2, "No such command 'fly'"),
    ("drain 9", (), 1, "No device has the UUID or index '9'"),
    ("drain", (), 2, "DEVICE"),
    ("undrain granting", (), 1, "No device has the UUID or index 'granting'"),
    ("trail --limit 0", (), 2, "write 1 or more"),
    ("simulate --policy luck", (), 1, "There is no policy 'luck'; there are gpuspawner, fifo"),
    ("simulate --days 3", (), 1, "No session with GPUs ended in the last 3 days"),
    # Members and the cluster.
    ("members", (), 1, "gpuspawner members rename OLD NEW"),
    ("members rename nobody x --yes", (), 1, "There is no member 'nobody'"),
    ("slurm sync", (), 2, "There is no cluster: write c.GPUSlurm.cluster_file"),
    ("slurm audit", (), 2, "There is no cluster: write c.GPUSlurm.cluster_file"),
]
NAMES = [" ".join([command, *more])[:60] or "no command" for command, more, *_ in MISTAKES]


@pytest.fixture(scope="module")
def site(migrated_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """Ada and Grace have all three devices, and Bob waits for one."""
    folder = tmp_path_factory.mktemp("hub")
    url = f"sqlite:///{shutil.copy(migrated_file, folder / 'hub.sqlite')}"
    Command(folder, url)
    services = make_services(database_url=url, device_source=FLEET)
    grant(services, ADA, devices=2, model="A100")
    grant(services, GRACE, devices=1)
    services.queue.ask(ServerRef("bob"), Request(devices=1), engine="local", terms=Terms(wait=True))
    yield services
    services.store.close()


def state(services: Services) -> list[Any]:
    return [
        services.ledger.accounts(),
        services.leases.open_leases(),
        services.queue.waiting(),
        services.devices.closures(),
        services.refills.all_refills(),
        services.audit.trail(),
    ]


@pytest.mark.parametrize(("command", "more", "code", "sentence"), MISTAKES, ids=NAMES)
def test_mistaken_command_is_explained_and_changes_nothing(
    site: Services,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    more: tuple[str, ...],
    code: int,
    sentence: str,
) -> None:
    monkeypatch.chdir(Path(site.store.engine.url.database or "").parent)
    before = state(site)
    assert main([*command.split(), *more]) == code
    printed = capsys.readouterr()
    assert (printed.out, sentence in printed.err) == ("", True), printed.err
    assert state(site) == before


@pytest.mark.parametrize("services", ["before", "after", ""])
def test_check_names_a_removed_setting_and_what_to_do(cli: Command, services: str) -> None:
    """Whichever line finds it first: ``add_services`` of the file, or the command after it."""
    file, add = cli.folder / "jupyterhub_config.py", "from gpuspawner import add_services\n"
    lines = ["c.GPUHealth.quiet_minutes = 5\n", "c.Broker.ticket_days = 2\n"]
    add += "add_services(c)\n"
    file.write_text(
        file.read_text()
        + "".join([add, *lines] if services == "before" else [*lines, add if services else ""])
    )
    said = cli("check", code=2).stderr
    for gone in (
        "c.GPUHealth.quiet_minutes is no longer a setting, it is always 10: leave it out",
        "c.Broker.ticket_days is no longer a setting, it has no successor: leave it out",
    ):
        assert gone in said
    assert ".." not in said and "ConfigError" not in said
