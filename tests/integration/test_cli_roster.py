"""The roster from a shell. Real: the command as a process, SQLite and PostgreSQL, files.
Simulated: the devices."""

from __future__ import annotations

from pathlib import Path

from gpuspawner.services import Broker
from tests.support.command import Command

TABLE = (
    "\ufeffName;Groups;Course;Starts;Ends;Mail\r\n"
    "Ada;course-ml, gpu;ml;2024-10-01;2099-02-28;ada@lab.example\r\n"
    "grace;;ml;;2099-02-28;\r\n"
)


def test_a_roster_is_tried_imported_shown_and_ended(
    cli: Command, broker: Broker, tmp_path: Path
) -> None:
    file = tmp_path / "course.csv"
    file.write_text(TABLE, encoding="utf-8")
    tried = cli("roster", "import", str(file), "--dry-run").stdout
    rows = [line.split() for line in tried.splitlines()]
    assert rows[0] == ["LINE", "NAME", "COURSE", "GROUPS", "STARTS", "ENDS", "MAIL", "WHAT"]
    assert rows[1][:2] == ["2", "ada"] and rows[1][-1] == "new"
    assert tried.endswith("Would write 2 new lines, 0 changed, 0 ended.\n")
    assert broker.roster.entries() == []

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
    assert "Line 2: the end 'soon' is no date." in broken.stderr
    assert broken.stderr.endswith("Nothing was changed.\n")

    ended = cli("roster", "end", "ada", "--reason", "left").stdout
    assert ended.startswith("The time of ada on the roster is over now.")
    assert "'ada' on the roster has ended already" in cli("roster", "end", "ada", code=1).stderr
    shown = [line.split()[::8] for line in cli("roster").stdout.splitlines()]
    assert [row[0] for row in shown] == ["NAME", "ada", "grace"]
    assert {entry["holds"] for entry in cli.json("roster", "show")} == {False}


def test_who_is_no_member_any_more_is_listed(cli: Command, broker: Broker) -> None:
    assert cli("roster", "--former").stdout == "Everybody who was a member still is.\n"
    broker.members.membership_ended("ada", "the group lab is not theirs any more", actor="sign-in")
    (former,) = cli.json("roster", "show", "--former")
    assert (former["name"], former["actor"]) == ("ada", "sign-in")
    assert "the group lab is not theirs any more" in cli("roster", "show", "--former").stdout
