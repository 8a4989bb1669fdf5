"""Decisions of an installation: valid answers, what happens to each file, what is missing."""

from __future__ import annotations

import difflib
import hashlib
import ipaddress
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from urllib.parse import parse_qsl, urlsplit

from .models import (
    ENGINE_GROUP,
    Answers,
    FileAction,
    FileChange,
    Machine,
    Question,
    SignIn,
    TargetFile,
)

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_QUOTED = r"""(?:'[^']*'|"(?:\\.|[^"\\])*")[ \t]*"""
_REST = r"(?:\\.|[^\\\n])*"
_ENTRY = re.compile(rf"([ \t]*[#;]{_REST}|[^\n=]*=[ \t]*(?:{_QUOTED})*{_REST}|[^\n]*)\n", re.DOTALL)
"""A comment, a variable or any other line; the first two may go on in the next lines."""
_VARIABLE = re.compile(r"\s*([A-Za-z_]\w*)[ \t]*=(.*)", re.DOTALL | re.ASCII)
_PLAIN = re.compile(r"[\w./:@%+=,~?&-]+", re.ASCII)
_ESCAPED = re.compile(r'([\\"$`])')
_LISTENS = "0A"
"""The state of a socket that listens, in the kernel's tables."""
_UNIT_PATH = re.compile(r"[\w./+-]+", re.ASCII)

HIDDEN = "***"
SHOWN_VARIABLE = re.compile(r"\w*_(CLIENT_ID|TENANT_ID)|OAUTH2?_\w*_URL")
"""Variables that are no secrets. A database's URL may contain a password."""

_HIDDEN_FOLDERS = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")  # nosec B108 - only compared
"""Folders that the units cannot read (``ProtectHome``, ``PrivateTmp``)."""

PROXY = "configurable-http-proxy"
HUB_PORT = 8081
PORTS = {
    8000: "the proxy",
    8001: "the proxy's API",
    HUB_PORT: "the hub's API",
    10190: "the accounting service",
}


# Answers.


def parse_domain(text: str) -> str:
    """Return a domain name in lower case. Raises ValueError for anything else."""
    name = text.strip().lower().rstrip(".")
    labels = name.split(".")
    fits = len(name) <= 253 and all(_LABEL.fullmatch(label) for label in labels)
    if not fits or len(labels) < 2 or labels[-1].isdigit():
        raise ValueError(
            f"{text!r} is not a domain name: write it like gpu.example.org, without https:// and "
            "without a port"
        )
    return name


def parse_database(text: str) -> str:
    """Return a PostgreSQL URL, or an empty text for SQLite. Raises ValueError."""
    if text == "sqlite":
        return ""
    problem = (
        "write sqlite, or a URL such as postgresql://gpuspawner@db.example.org/gpuspawner for "
        "PostgreSQL"
    )
    try:
        parsed = urlsplit(text)
    except ValueError:
        raise ValueError(problem) from None
    if parsed.scheme not in ("postgresql", "postgresql+psycopg") or not parsed.path.strip("/"):
        raise ValueError(problem)
    return check_line(text)


def has_password(url: str) -> bool:
    """Return True if a database's URL contains a password."""
    parsed = urlsplit(url)
    return bool(parsed.password) or any("password" in name for name, _ in parse_qsl(parsed.query))


def host_of(url: str) -> str:
    """Return the host name in a URL; empty if there is none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def parse_admin(text: str) -> str:
    """Return a user name. Raises ValueError."""
    name = text.strip()
    if not name or not name.isprintable() or re.search(r"[\s,/]", name):
        raise ValueError(f"{text!r} is not a user name: write one name, as its owner signs in")
    return name


def parse_subnet(text: str) -> str:
    """Return an IPv4 network for members' servers. Raises ValueError."""
    try:
        network = ipaddress.IPv4Network(text)
    except ValueError:
        network = None
    if network is None or network.prefixlen > 24 or not network.is_private:
        raise ValueError(
            f"{text!r} is not a private network with room for servers: write it like 172.30.0.0/16"
        )
    return str(network)


def gateway_of(subnet: str) -> str:
    """Return this machine's address on the network."""
    return str(next(ipaddress.IPv4Network(subnet).hosts()))


def parse_setting(text: str) -> tuple[str, str]:
    """Return the name and value of ``NAME=VALUE``. Raises ValueError."""
    name, sign, value = text.partition("=")
    if not sign or not name.strip():
        raise ValueError(f"{text!r} is not of the form NAME=VALUE")
    return name.strip(), check_line(value)


def check_line(text: str) -> str:
    """Return a text for one line of a file. Raises ValueError if it is not one line."""
    if not text.isprintable() or len(text) > 2000:
        raise ValueError("it is not one line of text")
    return text.strip()


def check_setting(question: Question, text: str) -> str:
    """Return the answer to a question of a sign-in. Raises ValueError."""
    value = check_line(text)
    if not value and question.default is None:
        raise ValueError("it is empty")
    if value and (question.name == "issuer" or question.name.endswith("url")):
        parsed = urlsplit(value)
        if parsed.scheme not in ("http", "https") or not parsed.hostname:
            raise ValueError(f"{value!r} is not an address: write it with https://")
    return value


def words(text: str) -> tuple[str, ...]:
    """Return the parts of a list with commas."""
    return tuple(filter(None, (part.strip() for part in text.split(","))))


# The file of variables.


def read_variables(text: str) -> dict[str, str]:
    """Return the variables in an environment file, with the quotes and escapes of systemd.

    A quote that is never closed ends at the end of its line, so that it does not hide the others.
    """
    found = {}
    for entry in _entries(text):
        if matched := _VARIABLE.fullmatch(entry):
            found[matched[1]] = _unquoted(matched[2])
    return found


def _entries(text: str) -> list[str]:
    return _ENTRY.findall(text.removesuffix("\n") + "\n")


def _unquoted(value: str) -> str:
    rest, found = value.strip(), ""
    while quoted := re.match(_QUOTED, rest, re.DOTALL):
        text = quoted[0].rstrip()
        double = text[0] == '"'
        found += re.sub(r'\\([\\"$`]|\n)', _escaped, text[1:-1]) if double else text[1:-1]
        rest = rest[quoted.end() :]
    return found + re.sub(r"\\(.)", _escaped, rest, flags=re.DOTALL)


def _escaped(found: re.Match[str]) -> str:
    return found[1].strip("\n")  # a line that goes on in the next


def _variable_line(name: str, value: str) -> str:
    if not _PLAIN.fullmatch(value):
        value = '"' + _ESCAPED.sub(r"\\\1", value) + '"'
    return f"{name}={value}"


def merge_variables(before: str, values: Mapping[str, str], without: Collection[str] = ()) -> str:
    """Return an environment file with these values. Other lines stay as they are."""
    left = dict(values)
    lines = []
    for line in _entries(before):
        matched = _VARIABLE.fullmatch(line)
        name = matched[1] if matched else ""
        if name in without:
            continue
        if matched and name in values:
            if name not in left:
                continue  # a second line for it, which would win
            value = left.pop(name)
            if _unquoted(matched[2]) != value:
                line = _variable_line(name, value)
        lines.append(line)
    lines += [_variable_line(name, value) for name, value in left.items()]
    return "\n".join(lines) + "\n"


# Files.


def hash_of(text: str) -> str:
    """Return the SHA-256 of a file's text."""
    return hashlib.sha256(text.encode()).hexdigest()


def decide(
    file: TargetFile, before: str | None, mode: int, hashes: Collection[str], *, force: bool = False
) -> FileChange:
    """Return what happens to a file.

    Args:
        file: The file as it should be.
        before: The text that is there; None if there is no file.
        mode: Its permissions.
        hashes: Those of the texts that ``init`` wrote there.
        force: True to replace edited files too.
    """
    return FileChange(file, before, _action(file, before, mode, hashes, force))


def _action(
    file: TargetFile, before: str | None, mode: int, hashes: Collection[str], force: bool
) -> FileAction:
    if before is None:
        return FileAction.CREATE
    if before == file.text:
        too_open = file.mode & 0o077 == 0 and mode & 0o077
        return FileAction.CLOSE if too_open else FileAction.NOTHING
    if force or file.keeps_edits or hash_of(before) in hashes:
        return FileAction.UPDATE
    return FileAction.KEEP if hash_of(file.text) in hashes else FileAction.CONFLICT


def diff_of(change: FileChange) -> str:
    """Return a unified diff of a file, without its secrets."""
    if change.action in (FileAction.NOTHING, FileAction.KEEP):
        return ""
    file, before = change.file, change.before or ""
    if change.action is FileAction.CLOSE:
        return f"mode of {file.path}: {file.mode:o}\n"
    old, new = _hidden(file, before, file.text)
    created = change.before is None
    lines = difflib.unified_diff(
        old.splitlines(),
        new.splitlines(),
        "/dev/null" if created else file.path,
        file.path,
        lineterm="",
    )
    return "\n".join(lines) + "\n"


def _hidden(file: TargetFile, before: str, after: str) -> tuple[str, str]:
    """Return both texts without secrets; a changed secret still shows as a change."""
    if not file.is_secret:
        return before, after
    if not file.has_variables:
        return (HIDDEN if before else ""), f"{HIDDEN} (new)"
    known = read_variables(before)
    return (
        "\n".join(_hide_entry(entry, {}) for entry in _entries(before)),
        "\n".join(_hide_entry(entry, known) for entry in _entries(after)),
    )


def _hide_entry(entry: str, known: Mapping[str, str]) -> str:
    matched = _VARIABLE.fullmatch(entry)
    if not matched:
        text = entry.strip()  # a comment may be a variable that was taken out
        return entry if not text or (text[0] == "#" and "=" not in text) else HIDDEN
    name = matched[1]
    if SHOWN_VARIABLE.fullmatch(name):
        return entry
    is_new = name in known and known[name] != _unquoted(matched[2])
    return f"{name}={HIDDEN}{' (new)' if is_new else ''}"


# What an installation needs.


def ports_in_use(tables: Iterable[str], gateway: str) -> frozenset[int]:
    """Return those of our ports that another program listens on.

    Args:
        tables: The texts of ``/proc/net/tcp`` and ``/proc/net/tcp6``.
        gateway: This machine's address on the servers' network, where the hub listens.
    """
    found = set()
    for line in "\n".join(tables).splitlines():
        fields = line.split()
        if len(fields) < 4 or fields[3] != _LISTENS:
            continue
        address, _, port = fields[1].partition(":")
        number = int(port, 16)
        ours = gateway if number == HUB_PORT else "127.0.0.1"
        if not address.strip("0") or address == _kernel_address(ours):
            found.add(number)
    return frozenset(found & PORTS.keys())


def _kernel_address(address: str) -> str:
    """Return an IPv4 address as the kernel's tables of a little-endian machine write it."""
    return ipaddress.IPv4Address(address).packed[::-1].hex().upper()


def find_obstacles(
    machine: Machine, sign_in: SignIn, answers: Answers, database: str, *, is_first: bool
) -> Iterator[str]:
    """Yield a sentence for everything that is missing: what it is, and what to do.

    ``is_first``: there is no unit of ours yet, so nothing may listen on our ports.
    """
    yield from _missing_engine(machine)
    yield from _missing_proxy(machine)
    folder = machine.bin_folder
    if folder.startswith(tuple(f"{each}/" for each in _HIDDEN_FOLDERS)):
        yield (
            f"gpuspawner is installed in {folder}, which services cannot read. Install it in "
            "/opt/gpuspawner: python3 -m venv /opt/gpuspawner, then "
            "/opt/gpuspawner/bin/pip install gpuspawner."
        )
    elif not _UNIT_PATH.fullmatch(folder):
        yield f"The path {folder} has characters that units cannot contain: use /opt/gpuspawner."
    if sign_in.needs_domain and not answers.domain:
        yield (
            f"The sign-in {sign_in.name} needs the hub's domain name, to which the provider sends "
            "people back: give it with --domain."
        )
    if sign_in.module and sign_in.module in machine.missing_modules:
        yield _install_extra(folder, sign_in.extra, f"The sign-in {sign_in.name}")
    if database and "psycopg" in machine.missing_modules:
        yield _install_extra(folder, "postgres", "PostgreSQL")
    if is_first:
        for port in sorted(machine.ports_in_use & PORTS.keys()):
            yield (
                f"Port {port}, for {PORTS[port]}, is in use by another program: stop it. "
                f"Its name: ss --listening --tcp --processes 'sport = :{port}'"
            )


def _missing_engine(machine: Machine) -> Iterator[str]:
    if "docker" not in machine.programs:
        yield (
            "There is no docker command: install Docker and NVIDIA's container toolkit first. On "
            "Debian and Ubuntu: apt-get install docker.io (on Debian 13 docker-cli too)."
        )
    elif ENGINE_GROUP not in machine.groups:
        yield f"There is no group {ENGINE_GROUP}, which Docker's packages make: reinstall Docker."


def _missing_proxy(machine: Machine) -> Iterator[str]:
    if PROXY in machine.programs and "node" in machine.programs:
        return
    prefix = machine.bin_folder.removesuffix("/bin")
    if "node" not in machine.programs:
        yield (
            "There is no Node.js, which the proxy needs. On Debian and Ubuntu: "
            "apt-get install --no-install-recommends nodejs npm."
        )
    if PROXY not in machine.programs:
        yield (
            f"There is no {PROXY}. With npm: npm install --global --prefix {prefix} '{PROXY}@^5.1'."
        )


def _install_extra(folder: str, extra: str, what: str) -> str:
    return f"{what} needs another package: {folder}/pip install 'gpuspawner[{extra}]'."
