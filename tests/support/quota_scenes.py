"""What happens on an XFS with project quotas; run there as root by :mod:`tests.support.uml`."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpuspawner.core.errors import QuotaUnavailable
from gpuspawner.services import Services
from gpuspawner.storage.quotas import Quotas, measure, project_of
from tests.support.brokers import open_services

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


def workspace(services: Services, root: Path, user: str, quota: int) -> Path:
    """A member's directory with a quota, as a start makes it."""
    mine = root / "work" / user
    mine.mkdir(parents=True, exist_ok=True)
    os.chown(mine, MEMBER, MEMBER)
    services.storage.use_workspace(str(mine), user, quota)
    services.storage.keep_quota(str(mine), quota)
    return mine


def held(services: Services, user: str) -> dict[str, Any]:
    """What the services say of a member's files."""
    [found] = services.storage.held_in(services.storage.workspaces_of(user))
    assert found.use is not None
    return {"used": found.use.used, "limit": found.use.limit, "full": found.use.full}


def as_member(command: str, capabilities: str = "") -> str:
    """What a shell of the member's prints, errors too."""
    words = ["setpriv", f"--reuid={MEMBER}", f"--regid={MEMBER}", "--clear-groups"]
    if capabilities:
        words += [f"--inh-caps={capabilities}", f"--ambient-caps={capabilities}"]
    words += ["sh", "-c", command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    return (done.stdout + done.stderr).strip()


def play(root: Path) -> dict[str, Any]:
    """Every scene, one after the other; the facts of each."""
    told: dict[str, Any] = {"problem": Quotas().problem(str(root / "work"))}
    told["elsewhere"] = Quotas().problem("/run")
    root.chmod(0o755)
    services = open_services(f"sqlite:///{root}/gpuspawner.sqlite")

    anna = workspace(services, root, "anna", 20 * MB)
    told["stopped"] = written(anna / "large", 30 * MB)
    told["full"] = held(services, "anna")
    bert = workspace(services, root, "bert", 40 * MB)
    told["other"] = written(bert / "large", 30 * MB)
    (anna / "large").unlink()
    told["cleaned"] = held(services, "anna")
    told["again"] = written(anna / "folder-less", 10 * MB)

    services.storage.use_workspace(str(anna), "anna", 5 * MB)
    services.storage.keep_quota(str(anna), 5 * MB)
    told["lowered"] = held(services, "anna")
    told["not a byte"] = written(anna / "more", MB)
    (anna / "folder-less").unlink()
    told["room again"] = written(anna / "more", MB)

    carl = root / "work" / "carl"
    (carl / "deep").mkdir(parents=True)
    outside = root / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(bytes(10 * MB))
    (carl / "deep" / "old").write_bytes(os.urandom(3 * MB))
    (carl / "out").symlink_to(outside)
    (carl / "deep" / "secret").symlink_to(outside / "secret")
    workspace(services, root, "carl", 8 * MB)
    told["old files"] = held(services, "carl")
    told["by looking"] = measure(str(carl))
    told["outside"] = project_of(str(outside))
    os.chown(outside, MEMBER, MEMBER)
    told["through a symlink"] = written(carl / "out" / "large", 30 * MB)

    projects = {project_of(str(some)) for some in (anna, bert, carl)}
    told["projects"] = len(projects)
    services.storage.keep_quota(str(anna), None)
    told["no limit"] = written(anna / "huge", 30 * MB)
    told["tampered"] = as_member(f"cd {bert}; mkdir t; xfs_io -c 'chproj 0' t; xfs_io -c lsproj t")
    inside = "mkdir u; xfs_io -c 'chproj 0' u; xfs_io -c lsproj u"
    told["in a user namespace"] = as_member(f'cd {bert}; unshare -Ur sh -c "{inside}"')
    new = root / "work" / "roots"
    new.mkdir()
    told["project of bert"] = project_of(str(bert))

    told["with capabilities"] = as_member(
        f"{sys.executable} -c 'from gpuspawner.storage.quotas import Quotas; "
        f'Quotas().set("{new}", 700000901, 1048576); '
        f'print(Quotas().use("{new}", 700000901).limit)\'',
        "+sys_admin,+fowner,+dac_read_search",
    )
    os.seteuid(MEMBER)
    try:
        Quotas().set(str(bert), 700_000_900, MB)
    except QuotaUnavailable as error:
        told["not root"] = error.message
    finally:
        os.seteuid(0)
    services.store.close()
    return told


if __name__ == "__main__":
    facts = play(Path(sys.argv[1]))
    Path(sys.argv[2]).write_text(json.dumps(facts), encoding="utf-8")
