"""Configuration and databases with faults. Real: the command, both databases."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from gpuspawner.cli.app import main
from gpuspawner.db.engine import Store
from gpuspawner.services import Services
from tests.support.brokers import make_services
from tests.support.command import FLEET, Command


def test_missing_sqlite_file_is_not_created(tmp_path: Path) -> None:
    cli = Command(tmp_path, f"sqlite:///{tmp_path}/mistyped.sqlite")
    for command in (["leases"], ["accounts"], ["grant", "ada", "1", "--reason", "x", "--open"]):
        assert f"There is no database at {tmp_path}/mistyped.sqlite" in cli(*command, code=1).stderr
    assert not (tmp_path / "mistyped.sqlite").exists()


def test_database_can_be_named_in_three_ways(
    cli: Command, services: Services, tmp_path: Path, database_url: str
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
        ("c.GPUDevices.refresh_seconds = 'soon'\n", "refresh_seconds"),
    ],
)
def test_broken_configuration_file_is_reported(tmp_path: Path, text: str, sentence: str) -> None:
    cli = Command(tmp_path, "sqlite:///x.sqlite")
    (tmp_path / "jupyterhub_config.py").write_text(text)
    assert sentence in cli("leases", code=2).stderr


@pytest.mark.parametrize(
    ("url", "command"),
    [
        ("postgresql+psycopg://hub:hunter%402@127.0.0.1:1/hub", ["check", "--no-containers"]),
        ("postgresql+psycopg://hub:hunter%402@127.0.0.1:1/hub", ["leases", "--debug"]),
        ("postgresql+psycopg://hub:hunter@2@127.0.0.1:nonsense/hub", ["leases", "--debug"]),
        ("oracle://hub:hunter@2@127.0.0.1:1/hub", ["leases", "--debug"]),
        ("oracle://hub:hunter@2@127.0.0.1:1/hub", ["check", "--no-containers"]),
    ],
)
def test_database_password_is_never_printed(
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


def test_unreachable_database_is_reported(tmp_path: Path) -> None:
    cli = Command(tmp_path, "postgresql+psycopg://hub@127.0.0.1:1/hub")
    done = cli("accounts", code=1)
    assert done.stderr.startswith("gpuspawner: The database does not answer.")
    assert "Connection refused" in done.stderr


def test_database_permission_error_is_reported(postgres: Any, tmp_path: Path) -> None:
    url = postgres.fresh_database()
    make_services(database_url=url, device_source=FLEET).ledger.open_account("ada")
    Store.open(url).close()
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text("DROP ROLE IF EXISTS stranger"))
        connection.execute(sa.text("CREATE ROLE stranger LOGIN"))
    engine.dispose()
    stranger = url.replace("postgres@", "stranger@")
    done = Command(tmp_path, stranger)("accounts", code=1)
    assert done.stderr.startswith("gpuspawner: The database refused: permission denied"), done


def test_closed_output_pipe_is_not_an_error(cli: Command, services: Services) -> None:
    for number in range(300):
        services.ledger.open_account(f"member-with-a-rather-long-name-{number}")
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


def test_help_and_version_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for command in ("check", "devices", "leases", "release", "grant", "statement", "accounts"):
        assert re.search(rf"^  {command}\b", text, re.MULTILINE)
        assert main([command, "--help"]) == 0
        assert "--config" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert re.fullmatch(r"gpuspawner \d+\.\d+\.\d+\S*\n", capsys.readouterr().out)
