"""Members' and groups' names on the nodes."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuspawner.slurm import accounts as slurm_accounts

ALLOWED = re.compile(r"[a-z][a-z0-9_-]{0,31}")

ANY_NAME = st.text(min_size=1, max_size=255)
SIMILAR = st.text("aAb.u-h_g2", min_size=1, max_size=40)


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
def test_a_members_user(member: str, user: str) -> None:
    assert slurm_accounts.user_of(member) == user
    assert slurm_accounts.member_of(user) == member


def test_a_long_name_is_a_digest_that_is_found_among_the_members() -> None:
    long = ["ada.lovelace@mathematics.example." + tail for tail in ("org", "net")]
    users = [slurm_accounts.user_of(member) for member in long]
    assert [len(user) for user in users] == [32, 32]
    assert [slurm_accounts.member_of(user) for user in users] == [None, None]
    assert slurm_accounts.by_user([*long, "ada"]) == {
        **dict(zip(users, long, strict=True)),
        "ada": "ada",
    }


@given(ANY_NAME | SIMILAR)
def test_every_name_is_one_that_linux_and_slurm_take_and_is_found_again(member: str) -> None:
    user = slurm_accounts.user_of(member)
    assert ALLOWED.fullmatch(user)
    assert user not in slurm_accounts.SYSTEM_USERS
    if user.startswith("h-"):
        assert slurm_accounts.member_of(user) is None
    else:
        assert slurm_accounts.member_of(user) == member


@given(st.lists(ANY_NAME | SIMILAR, unique=True, max_size=30))
def test_no_two_members_are_the_same_user_and_no_two_groups_the_same_account(
    some: list[str],
) -> None:
    assert len(slurm_accounts.by_user(some)) == len(some)
    accounts = {slurm_accounts.account_of(group) for group in some}
    assert len(accounts) == len(some)
    assert not accounts & {slurm_accounts.ROOT_ACCOUNT, slurm_accounts.EVERYBODY, "root"}


@given(st.text("abgu-h_0123456789f", max_size=34))
def test_what_is_read_back_is_what_was_written(word: str) -> None:
    if (member := slurm_accounts.member_of(word)) is not None:
        assert slurm_accounts.user_of(member) == word
    if (group := slurm_accounts.group_of(word)) is not None:
        assert slurm_accounts.account_of(group) == word


@given(ANY_NAME)
def test_a_groups_account(group: str) -> None:
    account = slurm_accounts.account_of(group)
    assert ALLOWED.fullmatch(account)
    assert slurm_accounts.group_of(account) == (None if account.startswith("gh-") else group)


def test_accounts_that_are_no_groups() -> None:
    assert slurm_accounts.account_of("") == "gpuspawner-members"
    assert slurm_accounts.group_of("gpuspawner-members") == ""
    assert slurm_accounts.group_of("research") is None
    assert slurm_accounts.group_of("g-") is None
    assert slurm_accounts.group_of("g-_zz") is None
    assert slurm_accounts.group_of("g-_61") is None  # an a is written as an a


def test_users_of_the_system_are_known_by_their_number() -> None:
    assert slurm_accounts.is_system_user("root")
    assert slurm_accounts.is_system_user("daemon")
    assert not slurm_accounts.is_system_user("nobody-of-this-name")
