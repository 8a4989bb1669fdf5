"""``gpuspawner workspaces`` and ``folders``. Real: a Docker Engine with volumes, directories with
symlinks, GNU tar, zstd, a process that is killed."""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from gpuspawner.cli.app import main
from gpuspawner.cli.check_servers import check_quotas
from gpuspawner.cli.config import load
from gpuspawner.cli.hub import open_hub
from gpuspawner.engines.preflight import Status
from gpuspawner.services import Services
from gpuspawner.storage.archives import WorkspaceJob
from tests.support.brokers import acquire, open_services
from tests.support.engine import PrivateEngine
from tests.support.images import INSTANT, ensure_images
from tests.support.processes import REPO, wait_for

CONFIG = """
c.JupyterHub.spawner_class = "gpu-docker"
c.GPUDatabase.url = {url!r}
c.GPUDevices.source = "simulated:1xT4"
c.GPUFolders.source = "{folder}/folders/{{id}}"
c.DockerSpawner.image = {image!r}
c.GPUDockerSpawner.workspace = {workspace!r}
"""


class Site:
    """A hub's configuration with its services, and the command beside it."""

    def __init__(self, folder: Path, engine: PrivateEngine, workspace: str) -> None:
        self.folder, self.engine = folder, engine
        url = f"sqlite:///{folder}/gpuspawner.sqlite"
        text = CONFIG.format(url=url, folder=folder, image=INSTANT, workspace=workspace)
        (folder / "jupyterhub_config.py").write_text(text, encoding="utf-8")
        self.services: Services = open_services(
            url, device_source="simulated:1xT4", folder_source=f"{folder}/folders/{{id}}"
        )
        for user in ("anna", "bert"):
            self.services.ledger.open_account(user)

    def __call__(self, *words: str, code: int = 0) -> str:
        """What a command printed, errors too; in this process, to import JupyterHub once."""
        said = io.StringIO()
        with redirect_stdout(said), redirect_stderr(said):
            ended = main([*words, "-f", str(self.folder / "jupyterhub_config.py")])
        assert "Traceback" not in said.getvalue(), said.getvalue()
        assert ended == code, said.getvalue()
        return said.getvalue()

    def listed(self) -> dict[str, dict[str, Any]]:
        """The list, by name."""
        found = json.loads(self("workspaces", "list", "--json"))
        return {some["workspace"]: some for some in found}

    def volume(self, name: str, user: str, script: str) -> str:
        """A volume of a member's, filled by a shell script in a container."""
        client = self.engine.client
        client.create_volume(name, labels={"gpuspawner.workspace": user})
        code, said = self.engine.run(INSTANT, ["sh", "-c", script], binds=[f"{name}:/w"])
        assert code == 0, said
        self.services.storage.use_workspace(name, user, None)
        return name


@pytest.fixture(scope="module")
def here(engine: PrivateEngine) -> Iterator[PrivateEngine]:
    ensure_images(engine, [INSTANT])
    yield engine
    engine.clean()


@pytest.fixture
def site(tmp_path: Path, here: PrivateEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("DOCKER_HOST", here.url)
    monkeypatch.chdir(tmp_path)
    made = Site(tmp_path, here, f"{tmp_path}/members/{{username}}")
    yield made
    made.services.store.close()


def fill(site: Site, user: str) -> Path:
    """A member's directory with files of theirs, and symlinks that point out of it."""
    outside = site.folder / "outside"
    outside.mkdir(exist_ok=True)
    (outside / "secret").write_text("not theirs")
    mine = site.folder / "members" / user
    (mine / "notes").mkdir(parents=True)
    (mine / "notes" / "über.txt").write_text("hello")
    (mine / "large").write_bytes(os.urandom(300_000))
    os.link(mine / "large", mine / "the same")
    (mine / "out").symlink_to(outside)
    (mine / "secret").symlink_to(outside / "secret")
    (mine / "run.sh").write_text("#!/bin/sh\n")
    (mine / "run.sh").chmod(0o750)
    for path in (mine, *mine.rglob("*")):
        os.chown(path, 1000, 100, follow_symlinks=False)
    site.services.storage.use_workspace(str(mine), user, None)
    return mine


def picture(folder: Path) -> dict[str, Any]:
    """Everything about every file of a directory."""
    found = {}
    for path in sorted(folder.rglob("*")):
        seen = path.lstat()
        content: Any = os.readlink(path) if path.is_symlink() else None
        if content is None and path.is_file():
            content = path.read_bytes()
        name = str(path.relative_to(folder))
        found[name] = (seen.st_mode, seen.st_uid, seen.st_gid, seen.st_nlink, content)
    return found


def test_directory_workspace_is_archived_deleted_and_restored(site: Site) -> None:
    mine = fill(site, "anna")
    before = picture(mine)
    files = [site.folder / f"anna.{ending}" for ending in ("tar.gz", "tar.zst", "tar")]
    for file in files:
        said = site("workspaces", "archive", "anna", "--to", str(file))
        assert "The workspace is as it was." in said
        assert picture(mine) == before and file.stat().st_mode & 0o777 == 0o600
    refused = site("workspaces", "archive", "anna", "--to", str(files[0]), code=1)
    assert "already exists" in refused

    says = site("workspaces", "delete", "anna", code=1)
    assert f"This would delete {mine} of anna" in says and f"--yes-delete {mine}" in says
    site("workspaces", "delete", "anna", "--yes-delete", "anna", code=1)
    assert picture(mine) == before
    assert "is not empty" in site("workspaces", "restore", str(files[0]), "anna", code=1)
    for file in files:
        site("workspaces", "delete", "anna", "--yes-delete", str(mine))
        assert not mine.exists() and list(mine.parent.iterdir()) == []
        assert (site.folder / "outside" / "secret").read_text() == "not theirs"
        assert "--member" in site("workspaces", "restore", str(file), str(mine), code=1)
        site("workspaces", "restore", str(file), str(mine), "--member", "anna")
        assert picture(mine) == before
        assert (mine.stat().st_uid, mine.stat().st_gid) == (1000, 100)
    assert site.listed()[str(mine)]["owner"] == "anna"
    trail = site("trail")
    for action in ("archive workspace", "delete workspace", "restore workspace"):
        assert action in trail


def test_volume_workspace_is_archived_deleted_and_restored(site: Site, here: PrivateEngine) -> None:
    """By the command and by the page: through the engine that the service reaches, which also knows
    containers without a lease."""
    script = (
        "cd /w && mkdir d && echo hello > d/note && ln -s /etc/passwd out && "
        "chown -R 1000:100 . && chmod 700 d"
    )
    look = ["sh", "-c", "cd /w && stat -c '%n %u %g %a %F' . d d/note out && cat d/note"]
    name = site.volume("work-bert", "bert", script)
    _, before = here.run(INSTANT, look, binds=["work-bert:/w"])
    file = site.folder / "bert.tar.gz"
    assert site.listed()[name]["owner"] == "bert"
    site("workspaces", "archive", name, "--to", str(file))
    with tarfile.open(file) as tar:
        assert tar.getmember("./out").linkname == "/etc/passwd"
    assert "is not empty" in site("workspaces", "restore", str(file), name, code=1)

    jobs = site.services.workspace_jobs

    def ended(job: WorkspaceJob) -> WorkspaceJob:
        def look() -> WorkspaceJob | None:
            now = next(some for some in jobs.jobs() if some.id == job.id)
            return None if now.is_open else now

        return wait_for(look, "the end of it", timeout=60)

    host = here.client.create_host_config(binds=[f"{name}:/w"])
    made = here.client.create_container(INSTANT, ["sleep", "300"], host_config=host, name="other")
    here.client.start(made["Id"])
    refused = ended(jobs.start_archive(name, actor="kim"))
    assert "in use by the container other" in refused.error
    here.client.remove_container(made["Id"], force=True)
    done = ended(jobs.start_archive(name, actor="kim"))
    assert (done.state, done.error) == ("done", "")

    site("workspaces", "delete", name, "--yes-delete", name)
    assert name not in {v["Name"] for v in here.client.volumes()["Volumes"] or []}
    site("workspaces", "restore", str(file), name, "--member", "bert")
    assert here.run(INSTANT, look, binds=["work-bert:/w"]) == (0, before)
    assert here.run(INSTANT, ["rm", "-r", "/w/d", "/w/out"], binds=["work-bert:/w"])[0] == 0
    back = ended(jobs.start_restore(done.archive, name, actor="kim"))
    assert (back.state, back.error) == ("done", "")
    assert here.run(INSTANT, look, binds=["work-bert:/w"]) == (0, before)
    assert site.services.storage.workspaces()[0].busy == ""
    assert [c for c in here.client.containers(all=True) if "archive" in c["Names"][0]] == []


def test_workspace_in_use_is_not_archived_or_deleted(site: Site, here: PrivateEngine) -> None:
    mine = fill(site, "anna")
    before = picture(mine)
    lease = acquire(site.services, "anna", 0)
    for words in (
        ("archive", "anna", "--to", f"{site.folder}/a.tar"),
        ("delete", "anna", "--yes-delete", str(mine)),
    ):
        assert "whose server runs" in site("workspaces", *words, code=1)
    assert site.listed()[str(mine)]["server_runs"]
    site.services.leases.release(lease.id, reason="stopped")
    client = here.client
    host = client.create_host_config(binds=[f"{mine}:/w"])
    made = client.create_container(INSTANT, ["sleep", "300"], host_config=host, name="another")
    client.start(made["Id"])
    try:
        says = site("workspaces", "delete", "anna", "--yes-delete", str(mine), code=1)
        assert "in use by the container another" in says
    finally:
        client.remove_container(made["Id"], force=True)
    assert picture(mine) == before and not (site.folder / "a.tar").exists()
    assert site.services.storage.workspaces()[0].busy == ""


def tar_without_end(folder: Path) -> str:
    """A PATH on which ``tar`` packs everything, and does not end before the file ``goes-on``, which
    it makes in the folder then, is removed."""
    script = folder / "bin" / "tar"
    script.parent.mkdir()
    mark = shlex.quote(str(folder / "goes-on"))
    program = shlex.quote(shutil.which("tar") or "tar")
    wait = f"touch {mark}\nwhile [ -e {mark} ]; do sleep 0.1; done"
    script.write_text(f'#!/bin/sh\n{program} "$@"\n{wait}\n', encoding="utf-8")
    script.chmod(0o755)
    return f"{script.parent}:{os.environ['PATH']}"


def test_killed_archive_leaves_no_file_and_can_be_repeated(site: Site) -> None:
    mine = fill(site, "anna")
    (mine / "huge").write_bytes(os.urandom(30_000_000))
    command = [sys.executable, "-m", "gpuspawner", "workspaces", "archive", "anna"]
    file = site.folder / "anna.tar.gz"
    environment = {**os.environ, "PYTHONPATH": str(REPO), "PATH": tar_without_end(site.folder)}
    process = subprocess.Popen([*command, "--to", str(file)], env=environment)
    wait_for(lambda: (site.folder / "goes-on").exists(), "all to be read", timeout=60)
    assert site.services.storage.workspaces()[0].busy
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=120)
    (site.folder / "goes-on").unlink()
    assert not file.exists()
    says = site("workspaces", "archive", "anna", "--to", str(file), code=1)
    assert "already being processed" in says and f"workspaces free {mine}" in says
    site("workspaces", "free", "anna")
    (mine / "huge").unlink()
    site("workspaces", "archive", "anna", "--to", str(file))
    assert file.exists()


def test_damaged_or_hostile_archive_restores_nothing(site: Site) -> None:
    fill(site, "anna")
    file = site.folder / "anna.tar.gz"
    site("workspaces", "archive", "anna", "--to", str(file))
    target = site.folder / "members" / "bert"
    whole = file.read_bytes()
    hostile = []
    for number, (name, kind, link) in enumerate(
        [
            ("../../escaped", tarfile.REGTYPE, ""),
            ("/escaped", tarfile.REGTYPE, ""),
            ("hard", tarfile.LNKTYPE, "../../outside/secret"),
            ("device", tarfile.BLKTYPE, ""),
        ]
    ):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as tar:
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, link
            tar.addfile(entry)
        bad = site.folder / f"bad{number}.tar"
        bad.write_bytes(out.getvalue())
        hostile.append((bad, "outside of it" if kind != tarfile.BLKTYPE else "device"))
    short, noise = site.folder / "short.tar.gz", site.folder / "noise.tar.zst"
    short.write_bytes(whole[: len(whole) // 2])
    noise.write_bytes(os.urandom(1000))
    hostile += [(short, "damaged or cut short"), (noise, "damaged or cut short")]
    hostile += [
        (site.folder / "missing.tar.gz", "No such file"),
        (site.folder / "x.zip", "ends in"),
    ]
    for bad, says in hostile:
        said = site("workspaces", "restore", str(bad), str(target), "--member", "bert", code=1)
        assert says in said, said
    assert not target.exists() and not (site.folder / "escaped").exists()
    assert {w.user for w in site.services.storage.workspaces()} == {"anna"}


def test_symlinked_workspace_is_not_followed(site: Site) -> None:
    mine = fill(site, "anna")
    (site.folder / "members" / "bert").symlink_to(site.folder / "outside")
    site.services.storage.use_workspace(str(site.folder / "members" / "bert"), "bert", None)
    file = f"{site.folder}/bert.tar"
    assert "There is no workspace" in site("workspaces", "archive", "bert", "--to", file, code=1)
    site("workspaces", "archive", "anna", "--to", f"{site.folder}/anna.tar")
    with tarfile.open(f"{site.folder}/anna.tar") as tar:
        assert tar.getmember("./out").issym() and tar.getmember("./secret").issym()
        assert not any("not theirs" in str(m.name) for m in tar.getmembers())
    assert mine.exists() and "There is no workspace 'nobody'" in site(
        "workspaces", "archive", "nobody", code=1
    )


def test_folders_command_manages_shared_folders(site: Site) -> None:
    made = site.services.shared_folders.make_folder("Daten", actor="anna")
    place = site.folder / "folders" / made.id
    place.mkdir(parents=True)
    (place / "note").write_text("hello")
    site.services.shared_folders.invite(made.id, "bert", write=True, actor="anna")
    assert "bert (rw, invited)" in site("folders")
    site.services.shared_folders.member_left("anna")
    assert "owner left" in site("folders", "list")
    assert "belongs to bert" in site("folders", "give", made.id[:6], "bert")
    assert "nobody named 'zoe'" in site("folders", "give", made.id, "zoe", code=1)
    assert "Delete it first" in site("folders", "remove", made.id, code=1)
    assert "write its name" in site("folders", "delete", made.id, code=1)
    site("folders", "delete", made.id, "--name", "Daten")
    site("folders", "restore", made.id)
    site("folders", "delete", made.id, "--name", "Daten")
    says = site("folders", "remove", made.id, "--yes-delete", "Data", code=1)
    assert f"This would remove {place}" in says and "--yes-delete 'Daten'" in says
    assert (place / "note").read_text() == "hello"
    site("folders", "remove", made.id, "--yes-delete", "Daten")
    assert not place.exists() and site.services.shared_folders.all_folders() == []
    assert "There is no folder 'x'" in site("folders", "restore", "x", code=1)


def test_check_reports_whether_quotas_are_enforced(site: Site) -> None:
    file = site.folder / "jupyterhub_config.py"
    plain = file.read_text()
    found = {}
    for setting in (
        "",
        "c.GPUDockerSpawner.workspace_quota = '5G'",
        "c.GPUFolders.quota = 5",
        "c.GPUDockerSpawner.workspace = 'work-{username}'\n"
        "c.GPUDockerSpawner.workspace_quota = lambda spawner: 5",
    ):
        file.write_text(f"{plain}\n{setting}\n")
        hub = open_hub(load(str(file), None).config)
        found[setting] = [(f.name, f.status, f.text) for f in check_quotas(hub)]
    nothing, directory, folder, volume = found.values()
    assert nothing == []
    [(name, status, text)] = directory
    assert (name, status) == ("quota", Status.FAIL)
    assert "keeps no project quotas" in text and str(site.folder) in text
    assert [(name, status) for name, status, _ in folder] == [("folder quota", Status.FAIL)]
    assert volume[0][2] == (
        "A quota is set but not enforced: a volume takes whatever is written into it."
    )
