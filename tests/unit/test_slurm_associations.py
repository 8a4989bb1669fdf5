"""What Slurm is told of groups and members. Not real: its database, which is kept here as the
tables that sacctmgr prints; tests/slurm has the real one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuspawner.core.errors import SlurmRefused
from gpuspawner.slurm import account_sync, accounts
from gpuspawner.slurm.account_sync import SyncStep
from gpuspawner.slurm.accounts import (
    AssociationLimits,
    AssociationRow,
    FoundAssociations,
    Group,
    Person,
    WantedAssociations,
)
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
        people, groups, AssociationLimits(devices=2, tickets=3), PRIORITIES
    )


def bring(database: Database, asked: WantedAssociations) -> list[str]:
    plan = account_sync.plan_sync(asked, database.found(), "lab")
    for step in plan.steps:
        database.do(step)
    assert account_sync.plan_sync(asked, database.found(), "lab").steps == ()
    return [step.what for step in plan.steps]


def row(database: Database, account: str, user: str = "") -> AssociationRow:
    found = database.found()
    return found.places[account, user].row if user else found.accounts[account]


ADA = Person(member="ada", group="research", priority="course")


def test_a_new_cluster_gets_everything_and_a_second_run_nothing() -> None:
    database = Database()
    limits = AssociationLimits(devices=4, tickets=10, gpu_hours=12.5)
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


def test_who_counts_on_another_group_has_no_open_place_in_the_old_one() -> None:
    database = Database()
    groups = {"research": Group(), "guests": Group()}
    bring(database, wanted([ADA], **groups))
    moved = Person(member="ada", group="guests", priority="low")
    bring(database, wanted([moved], **groups))
    assert row(database, "g-research", "ada").submits == 0
    assert row(database, "g-guests", "ada").submits == 5
    assert database.defaults["ada"] == "g-guests"
    bring(database, wanted([ADA], **groups))
    assert row(database, "g-research", "ada").submits == 5
    assert row(database, "g-guests", "ada").submits == 0


def test_who_has_no_credits_gets_no_gpu_and_who_has_left_no_job() -> None:
    database = Database()
    bring(database, wanted([Person(member="ada", dry=True), Person(member="eve", closed=True)]))
    assert row(database, "gpuspawner-members", "ada") == AssociationRow(gpus=0, shards=0, submits=5)
    assert row(database, "gpuspawner-members", "eve") == AssociationRow(gpus=0, shards=0, submits=0)
    bring(database, wanted([Person(member="ada"), Person(member="eve")]))
    assert row(database, "gpuspawner-members", "ada") == AssociationRow(gpus=2, submits=5)
    assert row(database, "gpuspawner-members", "eve") == AssociationRow(gpus=2, submits=5)


def test_what_a_site_made_itself_stays() -> None:
    theirs = [
        "physics|||root|7|||||normal|",
        "g-research|||root|1|||||normal|",
        "physics|ada|||1|cpu=8||||normal,long|long",
    ]
    database = Database(lines=theirs)
    database.defaults["ada"] = "physics"
    before = {key: dict(value) for key, value in database.rows.items()}
    asked = wanted([ADA, Person(member="bob")], research=Group())
    plan = account_sync.plan_sync(asked, database.found(), "lab")
    assert "g-research" in plan.problems[0] and "not below gpuspawner" in plan.problems[0]
    for step in plan.steps:
        database.do(step)
    assert {key: database.rows[key] for key in before} == before
    assert database.defaults["ada"] == "physics"
    assert ("g-research", "ada") not in database.rows
    assert ("gpuspawner-members", "bob") in database.rows


def test_what_an_admin_added_to_ours_stays() -> None:
    database = Database()
    bring(database, wanted([ADA], research=Group()))
    mine = database.rows["g-research", "ada"]
    mine |= {"GrpTRES": "cpu=8,gres/gpu=9", "fairshare": "5", "qos": "gpuspawner-course,long"}
    said = bring(database, wanted([Person(member="ada", group="research")], research=Group()))
    assert mine["GrpTRES"] == "cpu=8,gres/gpu=2"
    assert (mine["fairshare"], mine["qos"]) == ("5", "long,gpuspawner-normal")
    assert said == [
        "ada: in g-research: GrpTRES=gres/gpu=2, qos=long,gpuspawner-normal, "
        "defaultqos=gpuspawner-normal"
    ]


def test_what_is_the_same_for_many_is_one_step() -> None:
    database = Database()
    crowd = [Person(member=f"m{number}") for number in range(250)]
    bring(database, wanted())
    assert len(bring(database, wanted(crowd))) == 3
    assert len(bring(database, wanted([replace(each, dry=True) for each in crowd]))) == 3


def test_no_word_of_a_member_is_a_word_of_sacctmgr() -> None:
    nasty = Person(member="x account=root set adminlevel=admin; $(id)", group="a b=c,d")
    for step in account_sync.plan_sync(wanted([nasty]), Database().found(), "lab").steps:
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
    AssociationLimits,
    devices=st.none() | st.integers(0, 9),
    tickets=st.none() | st.integers(0, 9),
    gpu_hours=st.none() | st.floats(0, 1e6),
)
GROUPS = st.dictionaries(
    st.sampled_from(["research", "Guests & friends", "course"]),
    st.builds(Group, weight=st.floats(1e-6, 1e9), limits=SOME_LIMITS),
)
DAYS = st.tuples(PEOPLE, GROUPS, SOME_LIMITS, st.integers(0, 40))


@settings(max_examples=examples(60))
@given(st.lists(DAYS, min_size=1, max_size=4))
def test_killed_anywhere_the_next_run_ends_where_one_run_would_have(
    days: list[tuple[list[Person], dict[str, Group], AssociationLimits, int]],
) -> None:
    database = Database()
    for people, groups, limits, killed_after in days:
        asked = accounts.wanted_associations(people, groups, limits, PRIORITIES)
        for step in account_sync.plan_sync(asked, database.found(), "lab").steps[:killed_after]:
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


@pytest.mark.parametrize("version", ["slurm-wlm 21.08.8", "slurm 23.11.4", "slurm", ""])
def test_another_slurm_is_refused_with_the_one_that_was_tried(version: str) -> None:
    with pytest.raises(SlurmRefused, match=r"tried with 22\.05\.8"):
        account_sync.check_version(Recorder(version))


def test_the_one_that_was_tried_is_taken() -> None:
    account_sync.check_version(Recorder("slurm-wlm 22.05.11"))
