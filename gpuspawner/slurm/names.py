"""What members and groups are called on the nodes: as users of Linux and as accounts of Slurm.

A name that Linux and Slurm take as it is stays as it is, so that ``ada`` signs in over SSH as
``ada``. Every other one is written in letters that they take, behind ``u-``, and can be read back;
one that is too long for that becomes a digest, behind ``h-``, and is found again among the names
that are known. No two members get the same name: what stays as it is never begins with ``u-`` or
``h-``, what is written behind ``u-`` can be read in one way only, and two digests of 150 bits do
not meet by chance.

A group's account always begins with ``g-`` (``gh-`` for a digest), so that it is no account that a
site made by itself.
"""

from __future__ import annotations

import base64
import hashlib
import pwd
import re
from collections.abc import Iterable

MOST = 32
"""Characters of a user's name, for ``useradd`` and Slurm alike."""

ROOT_ACCOUNT = "gpuspawner"
"""The account above all of ours; what is not below it is the site's own."""

EVERYBODY = "gpuspawner-members"
"""The account of members who are in no group that has a say."""

FIRST_UID = 1000
"""Users below it are the system's, as ``login.defs`` has it everywhere."""

_PLAIN = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_WRITTEN = re.compile(r"(?:[a-z0-9-]|_[0-9a-f]{2})*")
_KEPT = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789-")
_BYTE = re.compile(rb"_([0-9a-f]{2})")

# Of Debian, Ubuntu and Red Hat, and of what a cluster runs.
_SYSTEM = """
    root toor bin daemon adm lp sync shutdown halt mail news uucp operator games gopher ftp man
    proxy www-data backup list irc gnats nobody nogroup sys sshd messagebus dbus polkitd avahi
    syslog tss ntp chrony landscape pollinate lxd statd rpc rpcuser nfsnobody postfix exim
    dnsmasq systemd nginx apache redis postgres mysql mariadb mongodb docker dockerroot
    containerd libvirt qemu slurm slurmdbd slurmrestd munge nvidia-persistenced jupyterhub
    jupyter gpuspawner telegraf grafana prometheus admin sudo wheel staff users
"""
SYSTEM_USERS = frozenset(_SYSTEM.split())
"""Names that are no member's on a node, whoever signs in by them."""


def user_of(member: str) -> str:
    """The user on the nodes that a member is: at most 32 of ``a-z 0-9 _ -``, a letter first."""
    plain = _PLAIN.fullmatch(member) and not member.startswith(("u-", "h-", "systemd-"))
    if plain and member not in SYSTEM_USERS:
        return member
    return _written("u-", "h-", member)


def member_of(user: str) -> str | None:
    """The member who is this user; None for a digest, and for a user whom no member can be."""
    found = _read("u-", user) if user.startswith("u-") else user
    return found if found is not None and user_of(found) == user else None


def account_of(group: str) -> str:
    """Slurm's account of a group; that of who is in none for an empty one."""
    return _written("g-", "gh-", group) if group else EVERYBODY


def group_of(account: str) -> str | None:
    """The group of an account, empty for that of everybody; None when it is no group's that can
    be read."""
    if account == EVERYBODY:
        return ""
    found = _read("g-", account) if account.startswith("g-") else None
    return found if found and account_of(found) == account else None


def by_user(members: Iterable[str]) -> dict[str, str]:
    """These members by the users that they are; digests too."""
    return {user_of(member): member for member in members}


def is_system_user(user: str) -> bool:
    """Whether this machine has a user of this name who is no person."""
    try:
        return pwd.getpwnam(user).pw_uid < FIRST_UID
    except KeyError:
        return False


def _written(prefix: str, digest: str, name: str) -> str:
    data = name.encode("utf-8", "surrogatepass")
    found = prefix + "".join(chr(b) if b in _KEPT else f"_{b:02x}" for b in data)
    if len(found) <= MOST:
        return found
    bits = base64.b32encode(hashlib.sha256(data).digest()).decode("ascii").lower()
    return digest + bits[: MOST - len(digest)]


def _read(prefix: str, word: str) -> str | None:
    rest = word.removeprefix(prefix)
    if not _WRITTEN.fullmatch(rest):
        return None
    data = _BYTE.sub(lambda match: bytes([int(match[1], 16)]), rest.encode("ascii"))
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return None
