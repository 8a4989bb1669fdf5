"""What happens on an XFS with project quotas; run there by :mod:`tests.support.disk_scenes`."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

from gpuspawner.core.errors import QuotaUnavailable
from gpuspawner.services import Services
from gpuspawner.storage.quotas import Quotas, QuotaUse, measure, project_of
from tests.support.brokers import open_services
from tests.support.processes import PATIENCE

MB = 2**20
MEMBER = 1000
"""The user of members' images."""


def written(path: Path, size: int) -> tuple[int, str]:
    """A member writes a file of this size: how many bytes went in, and what stopped them."""
    before = os.geteuid()
    os.seteuid(MEMBER)
    count, why = 0, ""
    try:
        with open(path, "wb", buffering=0) as file:
            while count < size:
                count += file.write(bytes(min(MB, size - count)))
            os.fsync(file.fileno())
    except OSError as error:
        why = errno.errorcode[error.errno or 0]
    finally:
        os.seteuid(before)
    return count, why


def workspace(services: Services, root: Path, user: str, quota: int | None) -> Path:
    """A member's directory with a quota, as a start makes it."""
    mine = root / "work" / user
    mine.mkdir(parents=True, exist_ok=True)
    os.chown(mine, MEMBER, MEMBER)
    services.storage.use_workspace(str(mine), user, quota)
    services.storage.keep_quota(str(mine), quota)
    return mine


def held(services: Services, user: str) -> QuotaUse:
    """What the services say of a member's files."""
    [found] = services.storage.held_in(services.storage.workspaces_of(user))
    assert found.use is not None
    return found.use


def as_member(command: str, capabilities: str = "") -> str:
    """What a shell of the member's prints, errors too."""
    words = ["setpriv", f"--reuid={MEMBER}", f"--regid={MEMBER}", "--clear-groups"]
    if capabilities:
        words += [f"--inh-caps={capabilities}", f"--ambient-caps={capabilities}"]
    words += ["sh", "-c", command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60 * PATIENCE, check=False)
    return (done.stdout + done.stderr).strip()


def same(found: object, expected: object) -> None:
    """Say both if they are not: pytest, which would, does not run here."""
    assert found == expected, f"{found!r} is not {expected!r}"


def play(services: Services, root: Path) -> None:
    """Every scene, one after the other."""
    elsewhere = "its file system keeps no project quotas (XFS, mounted with prjquota)."
    same(Quotas().problem("/run"), f"A quota for /run cannot be enforced: {elsewhere}")
    same(Quotas().problem(str(root / "work")), "")

    # No byte goes in beyond the quota, and who makes room goes on.
    anna = workspace(services, root, "anna", 20 * MB)
    same(written(anna / "large", 30 * MB), (20 * MB, "ENOSPC"))
    same(held(services, "anna"), QuotaUse(20 * MB, 20 * MB))
    same(held(services, "anna").full, True)
    bert = workspace(services, root, "bert", 40 * MB)
    same(written(bert / "large", 30 * MB), (30 * MB, ""))
    (anna / "large").unlink()
    same(held(services, "anna"), QuotaUse(0, 20 * MB))
    same(held(services, "anna").full, False)
    same(written(anna / "folder-less", 10 * MB), (10 * MB, ""))

    # A quota that is lowered holds what is there.
    workspace(services, root, "anna", 5 * MB)
    same(held(services, "anna"), QuotaUse(10 * MB, 5 * MB))
    same(written(anna / "more", MB), (0, "ENOSPC"))
    (anna / "folder-less").unlink()
    same(written(anna / "more", MB), (MB, ""))

    # Files that are there already count, and symlinks lead nowhere.
    carl, outside = root / "work" / "carl", root / "outside"
    (carl / "deep").mkdir(parents=True)
    outside.mkdir()
    (outside / "secret").write_bytes(bytes(10 * MB))
    (carl / "deep" / "old").write_bytes(os.urandom(3 * MB))
    (carl / "out").symlink_to(outside)
    (carl / "deep" / "secret").symlink_to(outside / "secret")
    workspace(services, root, "carl", 8 * MB)
    used, looked = held(services, "carl").used, measure(str(carl)) or 0
    assert 3 * MB <= used < 3 * MB + 65536 and abs(used - looked) < 65536, (used, looked)
    same(project_of(str(outside)), 0)
    os.chown(outside, MEMBER, MEMBER)
    same(written(carl / "out" / "large", 30 * MB), (30 * MB, ""))
    same(len({project_of(str(some)) for some in (anna, bert, carl)}), 3)
    workspace(services, root, "anna", None)
    same(written(anna / "huge", 30 * MB), (30 * MB, ""))

    # Who owns a file can move it out, but not in a user namespace, as the docs say of userns-remap.
    def chproj(name: str) -> str:
        return f"mkdir {name}; xfs_io -c 'chproj 0' {name}; xfs_io -c lsproj {name}"

    same(as_member(f"cd {bert}; {chproj('t')}"), "projid = 0")
    said = as_member(f'cd {bert}; unshare -Ur sh -c "{chproj("u")}"')
    assert f"projid = {project_of(str(bert))}" in said, said

    # A hub with the capabilities that the docs name needs no root; without, it is told what to set.
    new = root / "work" / "roots"
    new.mkdir()
    said = as_member(
        f"{sys.executable} -c 'from gpuspawner.storage.quotas import Quotas; "
        f'Quotas().set("{new}", 700000901, 1048576); '
        f'print(Quotas().use("{new}", 700000901).limit)\'',
        "+sys_admin,+fowner,+dac_read_search",
    )
    same(said, str(MB))
    os.seteuid(MEMBER)
    try:
        Quotas().set(str(bert), 700_000_900, MB)
    except QuotaUnavailable as error:
        said = error.message
    finally:
        os.seteuid(0)
    assert said.startswith("A quota for /run/xfs cannot be enforced: "), said
    assert 'c.GPUFolders.xfs_quota = ["sudo", "-n", "xfs_quota"]' in said, said


def main(root: Path) -> None:
    root.chmod(0o755)
    (root / "work").mkdir()
    services = open_services(f"sqlite:///{root}/gpuspawner.sqlite")
    play(services, root)
    services.store.close()
