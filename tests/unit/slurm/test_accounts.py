"""What Slurm is told of groups and members, and by which names. Not real: its database, which is
kept here as the tables that sacctmgr prints; tests/slurm has the real one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuspawner.core.errors import SlurmRefused
from gpuspawner.queue.models import QueueLimits
from gpuspawner.slurm import accounts
from gpuspawner.slurm.accounts import (
    AssociationRow,
    FoundAssociations,
    Group,
    Person,
    SyncStep,
    WantedAssociations,
)
from gpuspawner.slurm.config import GPU_BILLING
from tests.support.tier import examples

PRIORITIES = {"low": -40.0, "normal": 0.0, "course": 40.0, "admin": 80.0}
ROOT = "root|||||||||normal|"


class Database:
    """What sacctmgr keeps, changed by the same words."""

    def __init__(self, *, lines: Iterable[str] = ()) -> None:
        self.qos: dict[str, str] = {"normal": "0"}
        self.rows: dict[tuple[str, str], dict[str, str]] = {}
        self.defaults = {"root": "root"}
        for line in (ROOT, *lines):
            cells = line.split("|")
            names = ("fairshare", "GrpTRES", "GrpTRESRunMins", "GrpSubmitJobs", "MaxSubmitJobs")
            row = {"parent": cells[3], **dict(zip(names, cells[4:9], strict=True))}
            self.rows[cells[0], cells[1]] = row | {"qos": cells[9], "defaultqos": cells[10]}

    def found(self) -> FoundAssociations:
        lines = [
            f"{account}|{user}||{row.get('parent', '')}|{row.get('fairshare', '1')}"
            f"|{row.get('GrpTRES', '')}|{row.get('GrpTRESRunMins', '')}"
            f"|{row.get('GrpSubmitJobs', '')}|{row.get('MaxSubmitJobs', '')}"
            f"|{row.get('qos', 'normal')}|{row.get('defaultqos', '')}"
            for (account, user), row in self.rows.items()
        ]
        return accounts.parse_associations(
            "\n".join(lines),
            "\n".join(f"{name}|{priority}" for name, priority in self.qos.items()),
            "\n".join(f"{user}|{account}" for user, account in self.defaults.items()),
        )

    def do(self, step: SyncStep) -> None:
        verb, what, *words = step.words
        named = dict(word.partition("=")[::2] for word in words if "=" in word)
        if what == "qos":
            name = words[0] if verb == "add" else named["name"]
            assert (name in self.qos) == (verb == "modify"), step
            self.qos[name] = named["priority"]
            return
        assert named.pop("cluster") == "lab"
        name = named.pop("name", words[0])
        if "," in name:  # of many at once
            for each in name.split(","):
                other = [w.replace(name, each) for w in words]
                self.do(SyncStep((verb, what, *other), step.what))
            return
        if account := named.pop("defaultaccount", ""):
            assert (account, name) in self.rows
            self.defaults[name] = account
            return
        key = (named.pop("account"), name) if what == "user" else (name, "")
        assert (key in self.rows) == (verb == "modify"), step
        assert what == "account" or (key[0], "") in self.rows, step
        assert named.get("parent") in (None, "root") or (named["parent"], "") in self.rows
        if what == "user":
            self.defaults.setdefault(name, key[0])
            if "defaultqos" in named:
                assert named["defaultqos"] in self.qos
        row = self.rows.setdefault(key, {"parent": "root"} if what == "account" else {})
        for setting, value in named.items():
            row[setting] = (
                _merged(row.get(setting, ""), value)
                if setting.startswith("GrpTRES")
                else value.replace("-1", "")
            )


def _merged(before: str, change: str) -> str:
    old, new = (dict(p.split("=") for p in text.split(",") if p) for text in (before, change))
    return ",".join(f"{name}={most}" for name, most in {**old, **new}.items() if most != "-1")


def wanted(people: Iterable[Person] = (), **groups: Group) -> WantedAssociations:
    return accounts.wanted_associations(
        people, groups, QueueLimits(devices=2, tickets=3), PRIORITIES
    )


def bring(database: Database, asked: WantedAssociations) -> list[str]:
    plan = accounts.plan_sync(asked, database.found(), "lab")
    for step in plan.steps:
        database.do(step)
    assert accounts.plan_sync(asked, database.found(), "lab").steps == ()
    return [step.what for step in plan.steps]


def row(database: Database, account: str, user: str = "") -> AssociationRow:
    found = database.found()
    return found.places[account, user].row if user else found.accounts[account]


ADA = Person(member="ada", group="research", priority="course")


def test_new_cluster_is_fully_synced_by_one_run() -> None:
    database = Database()
    limits = QueueLimits(devices=4, tickets=10, gpu_hours=12.5)
    bring(database, wanted([ADA, Person(member="Žofie")], research=Group(weight=3, limits=limits)))
    assert row(database, "g-research") == AssociationRow(
        share=300, gpus=4, gpu_minutes=750, submits=14
    )
    assert row(database, "gpuspawner-members") == AssociationRow(share=100)
    assert row(database, "g-research", "ada") == AssociationRow(gpus=2, submits=5)
    found = database.found()
    assert found.places["g-research", "ada"].default_qos == "gpuspawner-course"
    assert found.places["gpuspawner-members", "u-_c5_bdofie"].qos == ("gpuspawner-normal",)
    assert found.parents["g-research"] == "gpuspawner"
    assert found.qos["gpuspawner-low"] == 0 and found.qos["gpuspawner-admin"] == 120


def test_limits_count_devices_and_shares_together_where_devices_are_shared() -> None:
    database = Database()
    limits = QueueLimits(devices=2, tickets=3, gpu_hours=1000)
    for shards in (4, 8, 1):
        asked = accounts.wanted_associations([ADA], {}, limits, PRIORITIES, shards)
        bring(database, asked)
        found = row(database, "g-research", "ada")
        assert (found.gpus, found.gpu_minutes, found.submits) == (2, 60_000, 2 * shards + 3)
        more = (2 * GPU_BILLING, 60_000 * shards) if shards > 1 else (None, None)
        assert (found.billing, found.shard_minutes) == more


def test_member_who_changes_group_cannot_submit_to_old_one() -> None:
    database = Database()
    guest = Person(member="ada", group="guests", priority="low")
    for person, (research, guests) in ((ADA, (5, None)), (guest, (0, 5)), (ADA, (5, 0))):
        bring(database, wanted([person], research=Group(), guests=Group()))
        assert row(database, "g-research", "ada").submits == research
        assert guests is None or row(database, "g-guests", "ada").submits == guests
        assert database.defaults["ada"] == ("g-guests" if person is guest else "g-research")


@pytest.mark.parametrize(
    ("state", "submits"), [({"dry": True}, 5), ({"closed": True}, 0)], ids=["dry", "left"]
)
def test_dry_member_cannot_use_gpus_and_closed_cannot_submit(
    state: dict[str, Any], submits: int
) -> None:
    database = Database()
    bring(database, wanted([Person(member="ada", **state)]))
    found = row(database, "gpuspawner-members", "ada")
    assert found == AssociationRow(gpus=0, shards=0, submits=submits)
    bring(database, wanted([Person(member="ada")]))
    assert row(database, "gpuspawner-members", "ada") == AssociationRow(gpus=2, submits=5)


def test_sync_keeps_accounts_made_by_the_site() -> None:
    theirs = [
        "physics|||root|7|||||normal|",
        "g-research|||root|1|||||normal|",
        "physics|ada|||1|cpu=8||||normal,long|long",
    ]
    database = Database(lines=theirs)
    database.defaults["ada"] = "physics"
    before = {key: dict(value) for key, value in database.rows.items()}
    asked = wanted([ADA, Person(member="bob")], research=Group())
    plan = accounts.plan_sync(asked, database.found(), "lab")
    assert "g-research" in plan.problems[0] and "outside gpuspawner" in plan.problems[0]
    for step in plan.steps:
        database.do(step)
    assert {key: database.rows[key] for key in before} == before
    assert database.defaults["ada"] == "physics"
    assert ("g-research", "ada") not in database.rows
    assert ("gpuspawner-members", "bob") in database.rows


def test_sync_keeps_admin_additions_to_managed_accounts() -> None:
    database = Database()
    bring(database, wanted([ADA], research=Group()))
    mine = database.rows["g-research", "ada"]
    mine |= {"GrpTRES": "cpu=8,gres/gpu=9", "fairshare": "5", "qos": "gpuspawner-course,long"}
    said = bring(database, wanted([Person(member="ada", group="research")], research=Group()))
    assert mine["GrpTRES"] == "cpu=8,gres/gpu=2"
    assert (mine["fairshare"], mine["qos"]) == ("5", "long,gpuspawner-normal")
    qos = "qos=long,gpuspawner-normal, defaultqos=gpuspawner-normal"
    assert said == [f"ada: in g-research: GrpTRES=gres/gpu=2, {qos}"]


def test_bulk_sync_takes_few_steps_and_names_are_escaped() -> None:
    database = Database()
    crowd = [Person(member=f"m{number}") for number in range(250)]
    bring(database, wanted())
    assert len(bring(database, wanted(crowd))) == 3
    assert len(bring(database, wanted([replace(each, dry=True) for each in crowd]))) == 3

    nasty = Person(member="x account=root set adminlevel=admin; $(id)", group="a b=c,d")
    for step in accounts.plan_sync(wanted([nasty]), Database().found(), "lab").steps:
        assert not any(c in word for word in step.words for c in ";$()\n'\"")
        assert "adminlevel=admin" not in step.words


MEMBERS = st.builds(
    Person,
    member=st.sampled_from(["ada", "Bob", "root", "eve@lab.example", "n" * 40]),
    group=st.sampled_from(["", "research", "Guests & friends"]),
    priority=st.sampled_from(sorted(PRIORITIES)),
    closed=st.booleans(),
    dry=st.booleans(),
)
PEOPLE = st.lists(MEMBERS, unique_by=lambda person: person.member, max_size=5)
SOME_LIMITS = st.builds(
    QueueLimits,
    devices=st.none() | st.integers(0, 9),
    tickets=st.none() | st.integers(0, 9),
    gpu_hours=st.none() | st.floats(0, 1e6),
)
GROUPS = st.dictionaries(
    st.sampled_from(["research", "Guests & friends", "course"]),
    st.builds(Group, weight=st.floats(1e-6, 1e9), limits=SOME_LIMITS),
)
DAYS = st.tuples(PEOPLE, GROUPS, SOME_LIMITS, st.sampled_from([1, 4]), st.integers(0, 40))


@settings(max_examples=examples(60))
@given(st.lists(DAYS, min_size=1, max_size=4))
def test_interrupted_sync_is_completed_by_the_next_run(
    days: list[tuple[list[Person], dict[str, Group], QueueLimits, int, int]],
) -> None:
    database = Database()
    for people, groups, limits, shards, killed_after in days:
        asked = accounts.wanted_associations(people, groups, limits, PRIORITIES, shards)
        for step in accounts.plan_sync(asked, database.found(), "lab").steps[:killed_after]:
            database.do(step)
    bring(database, asked)
    found = database.found()
    for user, (account, right, qos) in asked.users.items():
        place = found.places[account, user]
        assert (place.row, place.default_qos) == (right, qos)
        others = [p.row.submits for (a, u), p in found.places.items() if u == user and a != account]
        assert not any(others)
    assert {name: found.accounts[name] for name in asked.accounts} == asked.accounts


class Recorder:
    """A Slurm of one program's version."""

    def __init__(self, version: str) -> None:
        self.version = version

    def run(self, program: str, *words: str) -> str:
        assert (program, words) == ("sacctmgr", ("--version",))
        return self.version


TRIED = ["slurm-wlm 22.05.11", "slurm 22.05.2"]


@pytest.mark.parametrize(
    "version", [*TRIED, "slurm-wlm 21.08.8", "slurm 23.11.4", "slurm", "", "slurm 20.11.7"]
)
def test_untested_slurm_version_is_rejected(version: str) -> None:
    slurm: Any = Recorder(version)
    if version in TRIED:
        accounts.check_version(slurm)
        return
    with pytest.raises(SlurmRefused, match=r"tested with 22\.05\.8"):
        accounts.check_version(slurm)


# Names.


ALLOWED = re.compile(r"[a-z][a-z0-9_-]{0,31}")

ANY_NAME = st.text(min_size=1, max_size=255)
SIMILAR = st.text("aAb.u-h_g2", min_size=1, max_size=40)


def decoded(name: str, prefix: str) -> str:
    """What a name that is no digest was made from: no two can have the same."""
    if not name.startswith(prefix):
        return name
    data = re.sub(rb"_(..)", lambda m: bytes.fromhex(m[1].decode()), name[len(prefix) :].encode())
    return data.decode("utf-8", "surrogatepass")


@pytest.mark.parametrize(
    ("member", "user"),
    [
        ("ada", "ada"),
        ("ada_l-2", "ada_l-2"),
        ("Ada", "u-_41da"),
        ("ada@lab.example", "u-ada_40lab_2eexample"),
        ("root", "u-root"),
        ("slurm", "u-slurm"),
        ("systemd-network", "u-systemd-network"),
        ("u-root", "u-u-root"),
        ("h-abc", "u-h-abc"),
        ("1st", "u-1st"),
        ("-n", "u--n"),
        ("; rm -rf /", "u-_3b_20rm_20-rf_20_2f"),
        ("Žofie", "u-_c5_bdofie"),
        ("艾达", "u-_e8_89_be_e8_be_be"),
    ],
)
def test_member_name_maps_to_its_linux_user(member: str, user: str) -> None:
    assert accounts.user_of(member) == user


def test_long_member_name_becomes_a_resolvable_digest() -> None:
    long = ["ada.lovelace@mathematics.example." + tail for tail in ("org", "net")]
    users = [accounts.user_of(member) for member in long]
    assert all(len(user) == 32 and user.startswith("h-") for user in users)
    assert accounts.by_user([*long, "ada"]) == {**dict(zip(users, long, strict=True)), "ada": "ada"}


@given(ANY_NAME | SIMILAR)
def test_every_name_maps_to_a_valid_user_and_account(name: str) -> None:
    user, account = accounts.user_of(name), accounts.account_of(name)
    assert ALLOWED.fullmatch(user) and ALLOWED.fullmatch(account)
    assert user not in accounts.SYSTEM_USERS
    assert user.startswith("h-") or decoded(user, "u-") == name
    assert account.startswith("gh-") or (account[:2], decoded(account, "g-")) == ("g-", name)


@given(st.lists(ANY_NAME | SIMILAR, unique=True, max_size=30))
def test_members_and_groups_map_to_unique_slurm_names(some: list[str]) -> None:
    assert len(accounts.by_user(some)) == len(some)
    names = {accounts.account_of(group) for group in some}
    assert len(names) == len(some)
    assert not names & {accounts.ROOT_ACCOUNT, accounts.EVERYBODY, "root"}


def test_system_users_are_recognized() -> None:
    names = ("root", "daemon", "nobody-of-this-name")
    assert [accounts.is_system_user(name) for name in names] == [True, True, False]
