"""Members and the roster from a shell. Real: the command, files. Simulated: the
devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuspawner.core.units import MICRO
from gpuspawner.leases.models import ServerRef
from gpuspawner.services import Services
from gpuspawner.storage import repository as storage_repository
from gpuspawner.storage.repository import Workspace
from tests.support.command import ADA, Command, grant


@pytest.fixture
def files(tmp_path: Path, cli: Command, services: Services) -> Path:
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


def know(services: Services, source: str, user: str = "ada") -> None:
    """A server of this member's got this workspace once."""
    row = Workspace(source, user, services.clock())
    with services.store.write() as connection:
        storage_repository.put_workspace(connection, row)


def test_member_is_renamed_once_after_confirmation(
    cli: Command, services: Services, files: Path
) -> None:
    know(services, f"{files}/ada")
    services.ledger.grant("member:ada", 5 * MICRO, actor="root", reason="prize")
    balance = services.ledger.member("ada").balance
    said = cli("members", "rename", "ada", "lovelace", answer="n\n", code=1).stderr
    assert f"{files}/ada is renamed to {files}/lovelace" in said
    assert "Rename ada to lovelace? [y/N]" in said and said.endswith("Nothing was changed.\n")
    assert services.ledger.member("ada").balance == balance and (files / "ada").exists()
    done = cli("members", "rename", "ada", "lovelace", answer="y\n")
    assert done.stdout == "ada is renamed to lovelace.\n"
    assert (files / "lovelace" / "notebook").read_text() == "1 + 1" and not (files / "ada").exists()
    assert services.ledger.member("lovelace").balance == balance
    again = cli("members", "rename", "ada", "lovelace").stdout
    assert "ada was renamed to lovelace at 2" in again and again.endswith("Nothing to do.\n")
    assert cli.json("members", "rename", "ada", "lovelace", "--yes")["changed"] is False
    assert cli.json("audit")["ok"] is True
    assert "rename member" in cli("trail").stdout


@pytest.mark.parametrize(
    "known", [True, False], ids=["was killed after it", "no server got it yet"]
)
def test_rename_leaves_the_workspace_under_the_new_name(
    cli: Command, services: Services, files: Path, known: bool
) -> None:
    if known:
        know(services, f"{files}/ada")
        (files / "ada").rename(files / "lovelace")
    done = cli.json("members", "rename", "ada", "lovelace", "--yes")
    assert done["changed"]
    assert known or done["directories"] == {f"{files}/ada": f"{files}/lovelace"}
    assert (files / "lovelace" / "notebook").exists()
    found = [each.source for each, _ in services.storage.workspaces_of("lovelace")]
    assert found == [f"{files}/lovelace"] * known


def test_rename_is_refused_if_both_directories_have_files(
    cli: Command, services: Services, files: Path
) -> None:
    know(services, f"{files}/ada")
    (files / "lovelace").mkdir()
    (files / "lovelace" / "other").write_text("")
    said = cli("members", "rename", "ada", "lovelace", "--yes", code=1).stderr
    assert f"There are files in both {files}/ada and {files}/lovelace" in said
    (files / "lovelace" / "other").unlink()
    cli("members", "rename", "ada", "lovelace", "--yes")
    assert (files / "lovelace" / "notebook").exists()


def test_rename_prints_commands_for_manual_steps(
    cli: Command, services: Services, files: Path
) -> None:
    know(services, "work-ada")
    know(services, "/nowhere/ada/work")
    said = cli("members", "rename", "ada", "lovelace", "--yes").stdout
    assert "mv -T /nowhere/ada/work /nowhere/lovelace/work" in said
    assert "docker volume" not in said, "its name does not come from that of the member"
    config = cli.folder / "jupyterhub_config.py"
    with open(config, "a") as more:
        more.write("c.GPUDockerSpawner.workspace = 'work-{username}'\n")
    said = cli("members", "rename", "grace", "hopper", "--yes").stdout
    assert "docker volume" not in said, "no server ever made that volume"
    services.ledger.open_account("eve")
    know(services, "work-eve", "eve")
    done = cli.json("members", "rename", "eve", "eva", "--yes")
    assert done["volumes"] == {"work-eve": "work-eva"}


def test_rename_is_refused_while_a_server_uses_the_directory(
    cli: Command, services: Services, files: Path
) -> None:
    lease = grant(services, ADA, engine="docker", devices=1)
    said = cli("members", "rename", "ada", "lovelace", "--yes", code=1).stderr
    assert "Rename the member at the Hub first" in said
    services.leases.follow_rename(lease.id, ServerRef("lovelace"))
    said = cli("members", "rename", "ada", "lovelace", "--yes", code=1).stderr
    assert f"The server lovelace runs, with files in {files}/ada: stop it first" in said
    assert (files / "ada").exists()
    services.leases.release(lease.id, reason="stopped")
    cli("members", "rename", "ada", "lovelace", "--yes")


def test_rename_keeps_a_server_without_a_directory_running(
    cli: Command, services: Services
) -> None:
    lease = grant(services, ADA, engine="docker", devices=1)
    services.leases.follow_rename(lease.id, ServerRef("lovelace"))
    said = cli("members", "rename", "ada", "lovelace", "--yes").stderr
    assert "The server lovelace keeps running." in said
    assert services.leases.get(lease.id).account == "member:lovelace"


TABLE = (
    "\ufeffName;Groups;Course;Starts;Ends;Mail\r\n"
    "Ada;course-ml, gpu;ml;2024-10-01;2099-02-28;ada@lab.example\r\n"
    "grace;;ml;;2099-02-28;\r\n"
)


def test_roster_is_previewed_imported_shown_and_ended(
    cli: Command, services: Services, tmp_path: Path
) -> None:
    file = tmp_path / "course.csv"
    file.write_text(TABLE, encoding="utf-8")
    tried = cli("roster", "import", str(file), "--dry-run").stdout
    rows = [line.split() for line in tried.splitlines()]
    assert rows[0] == ["LINE", "NAME", "COURSE", "GROUPS", "STARTS", "ENDS", "MAIL", "WHAT"]
    assert rows[1][:2] == ["2", "ada"] and rows[1][-1] == "new"
    assert tried.endswith("Would write 2 new lines, 0 changed, 0 ended.\n")
    assert services.roster.entries() == []

    done = cli.json("roster", "import", "-", answer=TABLE)
    assert done["done"] and [line["what"] for line in done["lines"]] == ["new", "new"]
    assert done["lines"][0] | {"groups": None} == {
        "line": 2,
        "what": "new",
        "name": "ada",
        "course": "ml",
        "groups": None,
        "mail": "ada@lab.example",
        "starts_at": "2024-10-01T00:00:00+00:00",
        "ends_at": "2099-03-01T00:00:00+00:00",
        "holds": True,
    }
    changed = cli(
        *("roster", "import", "-", "--whole"), answer="name,course,ends\nada,ml,2099-03-31\n"
    ).stdout
    assert "groups was course-ml, gpu; starts was 2024-10-01; ends was 2099-02-28" in changed
    assert changed.endswith("Wrote 0 new lines, 1 changed, 1 ended.\n")
    assert "not in the file: ends now" in changed

    broken = cli("roster", "import", "-", answer="name,ends\nada,soon\nbob,\n", code=1)
    assert "Line 2: the end 'soon' is not a date." in broken.stderr
    assert broken.stderr.endswith("Nothing was changed.\n")

    ended = cli("roster", "end", "ada", "--reason", "left").stdout
    assert ended.startswith("The time of ada on the roster is over now.")
    assert "'ada' on the roster has ended already" in cli("roster", "end", "ada", code=1).stderr
    shown = [line.split()[::8] for line in cli("roster").stdout.splitlines()]
    assert [row[0] for row in shown] == ["NAME", "ada", "grace"]
    assert {entry["holds"] for entry in cli.json("roster", "show")} == {False}


def test_former_members_are_listed(cli: Command, services: Services) -> None:
    assert cli("roster", "--former").stdout == "Everybody who was a member still is.\n"
    services.members.membership_ended(
        "ada", "the group lab is not theirs any more", actor="sign-in"
    )
    (former,) = cli.json("roster", "show", "--former")
    assert (former["name"], former["actor"]) == ("ada", "sign-in")
    assert "the group lab is not theirs any more" in cli("roster", "show", "--former").stdout
