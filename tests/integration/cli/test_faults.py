"""Configuration and databases with faults. Real: the command, both databases."""

from __future__ import annotations

import json
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
from scripts.demo_state import State
from tests.support.brokers import make_services
from tests.support.command import FLEET, Command


def test_missing_sqlite_file_is_not_created(tmp_path: Path) -> None:
    cli = Command(tmp_path, f"sqlite:///{tmp_path}/mistyped.sqlite", is_process=False)
    for command in (["leases"], ["accounts"], ["grant", "ada", "1", "--reason", "x", "--open"]):
        assert f"There is no database at {tmp_path}/mistyped.sqlite" in cli(*command, code=1).stderr
    assert not (tmp_path / "mistyped.sqlite").exists()


def test_database_can_be_named_in_three_ways(
    cli: Command, services: Services, tmp_path: Path, database_url: str
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    other = Command(elsewhere, "sqlite:///not-there.sqlite", is_process=False)
    assert len(other.json("accounts", "-f", str(tmp_path / "jupyterhub_config.py"))) == 2
    assert len(other.json("accounts", "--database", database_url)) == 2
    (elsewhere / "jupyterhub_config.py").unlink()
    assert len(other.json("accounts", GPUSPAWNER_DATABASE_URL=database_url)) == 2


def test_command_finds_the_hub_and_names_it(
    cli: Command, services: Services, tmp_path: Path
) -> None:
    assert cli("accounts").stderr == "" and cli.hub_said
    text = (tmp_path / "jupyterhub_config.py").read_text()
    (tmp_path / "jupyterhub_config.py").unlink()
    state = State(tmp_path / ".demo")
    state.open()
    (tmp_path / "try_out.py").write_text(f"import os\n{text}assert os.environ['OF_THE_DEMO']")
    state.write_configuration(tmp_path / "try_out.py", {"OF_THE_DEMO": "yes"})
    said = cli("rates")
    assert said.stderr == f"hub: demo at {state.folder} (database {cli.database})\n"
    assert "3.60  A100" in said.stdout
    configured = json.dumps({"GPURates": {"by_model": {"*": 7}}})
    passed_on = {"GPUSPAWNER_CONFIG": configured, "GPUSPAWNER_DATABASE_URL": cli.database_url}
    said = cli("rates", **passed_on)
    assert said.stderr.startswith("hub: GPUSPAWNER_CONFIG in the environment (database ")
    assert "7.00  *" in said.stdout and "A100" not in said.stdout
    by_file = cli("rates", "-f", ".demo/jupyterhub_config.py", **passed_on)
    assert "hub: demo at" in by_file.stderr and "3.60  A100" in by_file.stdout
    assert cli("accounts", "--json", "-f", ".demo/jupyterhub_config.py").stderr == ""


def test_without_a_configuration_no_default_is_shown_as_the_site_s(
    services: Services, tmp_path: Path, database_url: str
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    cli = Command(empty, "sqlite:///hub.sqlite", is_process=False)
    (empty / "jupyterhub_config.py").unlink()
    for command in ("accounts", "rates", "devices", "queue", "roster", "catalog", "check"):
        refused = cli(command, code=2)
        assert refused.stdout == ""
        assert refused.stderr.startswith("gpuspawner: No hub is found from here. Run this in")
        assert "-f FILE" in refused.stderr and "--database URL" in refused.stderr
    named = ("--database", database_url)
    assert "without its configuration" in cli("accounts", *named).stderr
    for command in ("rates", "devices", "catalog", "workspaces", "simulate"):
        refused = cli(command, *named, code=2)
        assert refused.stdout == ""
        assert "Only the hub's configuration says" in refused.stderr


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
    cli = Command(tmp_path, "sqlite:///x.sqlite", is_process=False)
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
    cli = Command(tmp_path, "postgresql+psycopg://hub@127.0.0.1:1/hub", is_process=False)
    done = cli("accounts", code=1)
    assert done.stderr.startswith("gpuspawner: Database unavailable.")
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
    done = Command(tmp_path, stranger, is_process=False)("accounts", code=1)
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
    assert (done.returncode, done.stderr.count("\n")) == (0, 1), "only which hub it is about"
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
