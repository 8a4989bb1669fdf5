"""``gpuspawner members`` from a shell. Real: the command as a process, both databases, files.
Simulated: the devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuspawner.core.units import MICRO
from gpuspawner.leases.models import ServerRef
from gpuspawner.services import Broker
from gpuspawner.storage import repository as storage_repository
from gpuspawner.storage.repository import Workspace
from tests.support.command import ADA, Command, grant


@pytest.fixture
def files(tmp_path: Path, cli: Command, broker: Broker) -> Path:
    """Where the members' directories are; the hub makes them by a template."""
    root = tmp_path / "srv"
    (root / "ada").mkdir(parents=True)
    (root / "ada" / "notebook").write_text("1 + 1")
    with open(tmp_path / "jupyterhub_config.py", "a") as config:
        config.write(
            "c.JupyterHub.spawner_class = 'gpuspawner.spawners.docker.GPUDockerSpawner'\n"
            f"c.GPUDockerSpawner.workspace = '{root}/{{username}}'\n"
        )
    return root


def know(broker: Broker, source: str) -> None:
    """A server of ada's got this workspace once."""
    row = Workspace(source, "ada", broker.clock())
    broker.store.run(
        lambda connection: storage_repository.put_workspace(connection, row), write=True
    )


def test_a_member_is_renamed_once_and_asked_before(
    cli: Command, broker: Broker, files: Path
) -> None:
    know(broker, f"{files}/ada")
    broker.ledger.grant("member:ada", 5 * MICRO, actor="root", reason="prize")
    balance = broker.ledger.member("ada").balance
    said = cli("members", "rename", "ada", "lovelace", answer="n\n", code=1).stderr
    assert f"{files}/ada is renamed to {files}/lovelace" in said
    assert "Rename ada to lovelace? [y/N]" in said and said.endswith("Nothing was changed.\n")
    assert broker.ledger.member("ada").balance == balance and (files / "ada").exists()
    done = cli("members", "rename", "ada", "lovelace", answer="y\n")
    assert done.stdout == "ada is called lovelace from now on.\n"
    assert (files / "lovelace" / "notebook").read_text() == "1 + 1" and not (files / "ada").exists()
    assert broker.ledger.member("lovelace").balance == balance
    again = cli("members", "rename", "ada", "lovelace").stdout
    assert "ada was renamed to lovelace at 2" in again and again.endswith("Nothing to do.\n")
    assert cli.json("members", "rename", "ada", "lovelace", "--yes")["changed"] is False
    assert cli.json("audit")["ok"] is True
    assert "rename member" in cli("trail").stdout


def test_a_directory_that_no_server_got_yet_is_renamed_too(cli: Command, files: Path) -> None:
    done = cli.json("members", "rename", "ada", "lovelace", "--yes")
    assert done["changed"] and done["directories"] == {f"{files}/ada": f"{files}/lovelace"}
    assert (files / "lovelace" / "notebook").exists()


def test_who_was_killed_after_the_directory_says_it_again(
    cli: Command, broker: Broker, files: Path
) -> None:
    know(broker, f"{files}/ada")
    (files / "ada").rename(files / "lovelace")
    cli("members", "rename", "ada", "lovelace", "--yes")
    assert (files / "lovelace" / "notebook").exists()
    assert [each.workspace.source for each in broker.storage.files_of("lovelace")] == [
        f"{files}/lovelace"
    ]


def test_two_directories_with_files_are_left_to_the_admin(
    cli: Command, broker: Broker, files: Path
) -> None:
    know(broker, f"{files}/ada")
    (files / "lovelace").mkdir()
    (files / "lovelace" / "other").write_text("")
    said = cli("members", "rename", "ada", "lovelace", "--yes", code=1).stderr
    assert f"There are files in both {files}/ada and {files}/lovelace" in said
    (files / "lovelace" / "other").unlink()
    cli("members", "rename", "ada", "lovelace", "--yes")
    assert (files / "lovelace" / "notebook").exists()


def test_what_is_renamed_by_hand_is_said_with_the_commands(
    cli: Command, broker: Broker, files: Path
) -> None:
    know(broker, "work-ada")
    know(broker, "/nowhere/ada/work")
    said = cli("members", "rename", "ada", "lovelace", "--yes").stdout
    assert "mv -T /nowhere/ada/work /nowhere/lovelace/work" in said
    assert "docker volume" not in said, "its name does not come from that of the member"
    config = cli.folder / "jupyterhub_config.py"
    config.write_text(
        config.read_text() + "c.GPUDockerSpawner.workspace = 'work-{username}'\n", encoding="utf-8"
    )
    said = cli("members", "rename", "grace", "hopper", "--yes").stdout
    assert "docker volume" not in said, "no server ever made that volume"
    broker.ledger.open_account("eve")
    row = Workspace("work-eve", "eve", broker.clock())
    broker.store.run(
        lambda connection: storage_repository.put_workspace(connection, row), write=True
    )
    done = cli.json("members", "rename", "eve", "eva", "--yes")
    assert done["volumes"] == {"work-eve": "work-eva"}


def test_a_running_server_keeps_its_directory(cli: Command, broker: Broker, files: Path) -> None:
    lease = grant(broker, ADA, engine="docker", devices=1)
    said = cli("members", "rename", "ada", "lovelace", "--yes", code=1).stderr
    assert "Rename the member at the Hub first" in said
    broker.follow_rename(lease.id, ServerRef("lovelace"))
    said = cli("members", "rename", "ada", "lovelace", "--yes", code=1).stderr
    assert f"The server lovelace runs, with files in {files}/ada: stop it first" in said
    assert (files / "ada").exists()
    broker.release(lease.id, reason="stopped")
    cli("members", "rename", "ada", "lovelace", "--yes")


def test_a_server_without_a_directory_goes_on(cli: Command, broker: Broker) -> None:
    lease = grant(broker, ADA, engine="docker", devices=1)
    broker.follow_rename(lease.id, ServerRef("lovelace"))
    said = cli("members", "rename", "ada", "lovelace", "--yes").stderr
    assert "The server lovelace goes on." in said
    assert broker.lease(lease.id).account == "member:lovelace"


def test_refusals_are_sentences(cli: Command) -> None:
    assert (
        "Nothing is known of a member 'nobody'"
        in cli("members", "rename", "nobody", "x", "--yes", code=1).stderr
    )
    assert "gpuspawner members rename OLD NEW" in cli("members", code=1).stderr
