"""A real directory (Debian's slapd) on a free loopback port, in a folder of its own."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import ldap3

from tests.support.identity import password_of
from tests.support.processes import (
    LIVE,
    alive,
    die_with_us,
    end_process,
    free_port,
    system_path,
    wait_for,
)

SUFFIX = "dc=lab,dc=example"
PEOPLE, GROUPS = f"ou=people,{SUFFIX}", f"ou=groups,{SUFFIX}"
ADMIN, ADMIN_PASSWORD = f"cn=admin,{SUFFIX}", "the-admin-of-the-directory"
READER, READER_PASSWORD = f"cn=hub,{SUFFIX}", "the-hub-reads-with-this"

CONFIG = """\
include /etc/ldap/schema/core.schema
include /etc/ldap/schema/cosine.schema
include /etc/ldap/schema/inetorgperson.schema
include /etc/ldap/schema/nis.schema
modulepath /usr/lib/ldap
moduleload back_mdb
pidfile {folder}/slapd.pid
database mdb
suffix "{suffix}"
rootdn "{admin}"
rootpw {password}
directory {folder}/data
maxsize 16777216
access to attrs=userPassword by anonymous auth by * none
access to * by dn.exact="{reader}" read by * none
"""


def dn_of(user: str) -> str:
    """The entry of somebody."""
    return f"uid={user},{PEOPLE}"


class Directory:
    """People and their groups, served over LDAP. ``users`` maps a name to its groups.

    Only ``READER`` may read; people may only prove their passwords.
    """

    name = "directory"

    def __init__(self, folder: Path, *, users: Mapping[str, Sequence[str]]) -> None:
        self.folder = folder
        self.users = users
        self.port = free_port()
        self._log = folder / "slapd.log"
        self._process: subprocess.Popen[bytes] | None = None
        (folder / "data").mkdir(parents=True)
        config = CONFIG.format(
            folder=folder, suffix=SUFFIX, admin=ADMIN, password=ADMIN_PASSWORD, reader=READER
        )
        (folder / "slapd.conf").write_text(config)

    def start(self) -> None:
        """Start, fill it the first time, and return once it answers."""
        program = shutil.which("slapd", path=system_path())
        if program is None:
            raise RuntimeError("slapd is missing: run scripts/test_parts.sh")
        command = [program, "-f", str(self.folder / "slapd.conf")]
        command += ["-h", f"ldap://127.0.0.1:{self.port}", "-d", "0"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                die_with_us(command), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        LIVE.append(self)
        admin = wait_for(self._answers, "the directory to answer", timeout=30)
        if not admin.search(SUFFIX, "(objectClass=*)", search_scope=ldap3.BASE):
            self._fill(admin)
        admin.unbind()

    def stop(self) -> None:
        """End it; the port answers nobody from then on."""
        if self._process is not None:
            end_process(self._process.pid)
            self._process.wait()
            self._process = None
        if self in LIVE:
            LIVE.remove(self)

    def leave_group(self, user: str, group: str) -> None:
        """Take somebody out of a group."""
        change = {"member": [(ldap3.MODIFY_DELETE, [dn_of(user)])]}
        self._change(lambda admin: admin.modify(f"cn={group},{GROUPS}", change))

    def join_group(self, user: str, group: str) -> None:
        """Put somebody into a group."""
        change = {"member": [(ldap3.MODIFY_ADD, [dn_of(user)])]}
        self._change(lambda admin: admin.modify(f"cn={group},{GROUPS}", change))

    def remove(self, user: str) -> None:
        """Take somebody out of the directory."""
        self._change(lambda admin: admin.delete(dn_of(user)))

    def log_text(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def _answers(self) -> ldap3.Connection | None:
        if self._process is None or not alive(self._process.pid):
            raise RuntimeError(f"slapd ended:\n{self.log_text()}")
        try:
            server = ldap3.Server("127.0.0.1", port=self.port)
            return ldap3.Connection(server, ADMIN, ADMIN_PASSWORD, auto_bind=True)
        except ldap3.core.exceptions.LDAPException:
            return None

    def _change(self, change: object) -> None:
        admin = self._answers()
        assert admin is not None and callable(change)
        try:
            if not change(admin):
                raise RuntimeError(f"the directory refuses a change: {admin.result}")
        finally:
            admin.unbind()

    def _fill(self, admin: ldap3.Connection) -> None:
        secret = {"userPassword": READER_PASSWORD}
        entries: list[tuple[str, list[str], dict[str, object]]] = [
            (SUFFIX, ["dcObject", "organization"], {"dc": "lab", "o": "Lab"}),
            (PEOPLE, ["organizationalUnit"], {"ou": "people"}),
            (GROUPS, ["organizationalUnit"], {"ou": "groups"}),
            (READER, ["applicationProcess", "simpleSecurityObject"], {"cn": "hub", **secret}),
        ]
        for user in self.users:
            values: dict[str, object] = {"uid": user, "cn": user, "sn": user}
            values |= {"mail": f"{user}@lab.example", "userPassword": password_of(user)}
            entries.append((dn_of(user), ["inetOrgPerson"], values))
        for group in sorted({name for names in self.users.values() for name in names}):
            inside = [dn_of(user) for user in self.users if group in self.users[user]]
            values = {"cn": group, "member": [ADMIN, *inside]}
            entries.append((f"cn={group},{GROUPS}", ["groupOfNames"], values))
        for dn, classes, attributes in entries:
            if not admin.add(dn, classes, attributes):
                raise RuntimeError(f"{dn} cannot be added: {admin.result}")
