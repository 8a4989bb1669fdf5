"""Archives that admins start from a page. Real: both databases, directories, GNU tar, threads that
race, the service as a process that is killed. No engine: members' servers are local processes."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import docker
import pytest
import requests

from gpuspawner.core.errors import (
    ArchiveCancelled,
    Refused,
    UnknownAccount,
    UnknownArchive,
    UnknownWorkspace,
    WorkspaceBusy,
)
from gpuspawner.services import Services
from gpuspawner.storage import archives as archives_module
from gpuspawner.storage import directories as directories_module
from gpuspawner.storage.archives import (
    Progress,
    WorkspaceArchiver,
    WorkspaceJob,
    WorkspaceJobs,
)
from gpuspawner.storage.directories import ArchiveContents, Watch, check_archive
from gpuspawner.storage.repository import Workspace
from gpuspawner.storage.service import ARCHIVING, CANCELLING
from tests.support.archives import Held, archive_with
from tests.support.brokers import Clock, Make, acquire, services_on
from tests.support.hub import ADMIN
from tests.support.processes import wait_for
from tests.support.service_process import ServiceProcess
from tests.support.threads import at_once
from tests.support.tier import Rounds

KIM = "kim"


@pytest.fixture
def services(make: Make, tmp_path: Path) -> Services:
    made = make(archives=str(tmp_path / "archives"), gpu_injection="process")
    for name in ("anna", "bert"):
        made.ledger.open_account(name)
    return made


@pytest.fixture
def work(services: Services, tmp_path: Path) -> Callable[[str], str]:
    """Make a member's workspace with a file, and say where it is."""

    def make(user: str, content: bytes = b"hello") -> str:
        folder = tmp_path / "members" / user
        folder.mkdir(parents=True)
        (folder / "note").write_bytes(content)
        services.storage.use_workspace(str(folder), user, None)
        return str(folder)

    return make


@dataclass(frozen=True)
class Watched(WorkspaceArchiver):
    """Begins no archive before ``gate`` is set, and keeps how many ran whenever one began."""

    gate: threading.Event = field(default_factory=threading.Event)
    running: set[Path] = field(default_factory=set)
    counts: list[int] = field(default_factory=list)

    def archive(
        self,
        known: Workspace,
        file: Path,
        *,
        actor: str,
        progress: Progress = lambda size: None,
    ) -> ArchiveContents:
        self.running.add(file)
        self.counts.append(len(self.running))
        assert self.gate.wait(120)
        try:
            return super().archive(known, file, actor=actor, progress=progress)
        finally:
            self.running.remove(file)


@pytest.fixture
def watched(services: Services) -> Watched:
    """What archives from now on."""
    return archive_with(services, Watched)


def ended(services: Services, job: WorkspaceJob) -> WorkspaceJob:
    """Wait for the end of a job, and return what became of it."""

    def look() -> WorkspaceJob | None:
        now = next(some for some in services.workspace_jobs.jobs() if some.id == job.id)
        return None if now.is_open else now

    return wait_for(look, "the end of it")


def test_workspace_is_archived_deleted_and_restored(
    services: Services, work: Callable[[str], str]
) -> None:
    source, jobs = work("anna"), services.workspace_jobs
    done = ended(services, jobs.start_archive(source, actor=KIM))
    assert (done.state, done.error, done.done_bytes) == ("done", "", 5)
    assert done.archive == "anna-2025-03-01-120000.tar.gz"
    [archive] = jobs.archives()
    assert (archive.name, archive.workspace) == (done.archive, source)
    modes = [oct(path.stat().st_mode & 0o777) for path in (jobs.folder, jobs.folder / archive.name)]
    assert modes == ["0o700", "0o600"]

    note = Path(source) / "note"
    assert note.read_bytes() == b"hello"
    full = ended(services, jobs.start_restore(archive.name, source, actor=KIM))
    assert full.state == "failed" and f"{source} is not empty" in full.error
    note.unlink()
    back = ended(services, jobs.start_restore(archive.name, source, actor=KIM))
    assert (back.state, back.error) == ("done", "")
    assert note.read_bytes() == b"hello"
    assert {some.busy for some in services.storage.workspaces()} == {""}
    trail = [(some.actor, some.action, some.subject) for some in services.audit.trail()]
    assert trail == [(KIM, "restore workspace", source), (KIM, "archive workspace", source)]

    # It is deleted, and comes back for a member who has signed in.
    note.unlink()
    note.parent.rmdir()
    services.storage.note_workspace(source, "delete workspace", actor=KIM)
    with pytest.raises(Refused, match="say which member it will belong to"):
        jobs.start_restore(archive.name, source, actor=KIM)
    with pytest.raises(UnknownAccount):
        jobs.start_restore(archive.name, source, member="zoe", actor=KIM)
    with pytest.raises(UnknownWorkspace):  # no other directory of the machine can be named
        jobs.start_restore(archive.name, "/etc/new", member="bert", actor=KIM)
    done = ended(services, jobs.start_restore(archive.name, source, member="bert", actor=KIM))
    assert done.state == "done" and note.read_bytes() == b"hello"
    [known] = services.storage.workspaces()
    assert (known.source, known.user, known.busy) == (source, "bert", "")
    with pytest.raises(Refused, match="belongs to bert"):
        jobs.start_restore(archive.name, source, member="anna", actor=KIM)


def test_only_files_of_the_folder_are_archives(services: Services, tmp_path: Path) -> None:
    jobs = services.workspace_jobs
    assert jobs.archives() == []
    jobs.folder.mkdir()
    outside = tmp_path / "outside.tar.gz"
    outside.write_bytes(b"secret")
    (jobs.folder / "link.tar.gz").symlink_to(outside)
    (jobs.folder / ".7.half.tar.gz").write_bytes(b"half")
    (jobs.folder / "notes.txt").write_bytes(b"no archive")
    (jobs.folder / "copied.tar").write_bytes(b"by hand")
    assert [(some.name, some.workspace) for some in jobs.archives()] == [("copied.tar", "")]
    for name in ("link.tar.gz", "../outside.tar.gz", str(outside), ".7.half.tar.gz", "notes.txt"):
        with pytest.raises(UnknownArchive):
            jobs.start_restore(name, "/srv/w/anna", actor=KIM)


def test_workspace_in_use_or_in_hand_is_refused_in_words(
    services: Services, work: Callable[[str], str], watched: Watched
) -> None:
    source, jobs = work("anna"), services.workspace_jobs
    lease = acquire(services, "anna", 0)
    with pytest.raises(WorkspaceBusy, match=f"whose server runs .lease {lease.id}"):
        jobs.start_archive(source, actor=KIM)
    services.leases.release(lease.id, reason="stopped")
    services.storage.claim_workspace(source, "an admin archives them")
    with pytest.raises(WorkspaceBusy, match="already being processed"):
        jobs.start_archive(source, actor=KIM)
    services.storage.free_workspace(source)
    with pytest.raises(UnknownWorkspace):
        jobs.start_archive("/srv/w/zoe", actor=KIM)
    assert jobs.jobs() == [] and services.audit.trail() == []

    job = jobs.start_archive(source, actor=KIM)
    for again in (jobs.start_archive, jobs.unlock):
        with pytest.raises(WorkspaceBusy, match="is being archived, or waits for it"):
            again(source, actor=KIM)
    acquire(services, "anna", 0)  # before its turn
    watched.gate.set()
    done = ended(services, job)
    assert done.state == "failed" and "anna, whose server runs" in done.error
    assert jobs.archives() == [] and not jobs.unlock(source, actor=KIM)


def test_racing_requests_archive_each_workspace_once_and_one_at_a_time(
    services: Services, work: Callable[[str], str], watched: Watched
) -> None:
    sources = [work(f"user{number}") for number in range(4)]
    jobs = services.workspace_jobs
    found = at_once(16, lambda number: jobs.start_archive(sources[number % 4], actor=KIM))
    started = [each for each in found if isinstance(each, WorkspaceJob)]
    refused = [each for each in found if isinstance(each, WorkspaceBusy)]
    assert sorted(job.workspace for job in started) == sources
    assert len(refused) == 12
    watched.gate.set()
    assert {ended(services, job).state for job in started} == {"done"}
    assert watched.counts == [1, 1, 1, 1] and len(jobs.archives()) == 4


def test_racing_processes_archive_a_workspace_once(
    make: Make, services: Services, work: Callable[[str], str], tmp_path: Path
) -> None:
    """The database decides between a page and a command, which know nothing of each other."""
    work("anna", os.urandom(2_000_000))
    [known] = services.storage.workspaces()
    others = [make(archives=str(tmp_path / f"of-{n}"), gpu_injection="process") for n in range(4)]

    def archive(number: int) -> object:
        archiver = others[number].workspace_jobs._archiver
        return archiver.archive(known, tmp_path / f"{number}.tar.gz", actor=KIM)

    found = at_once(4, archive)
    refused = [each for each in found if isinstance(each, WorkspaceBusy)]
    made = list(tmp_path.glob("*.tar.gz"))
    assert len(made) + len(refused) == 4 and made
    assert len(services.audit.trail()) == len(made)
    assert services.storage.workspaces()[0].busy == ""


def test_step_of_the_clock_in_the_middle_leaves_nothing_locked(
    services: Services, work: Callable[[str], str]
) -> None:
    """Minutes lie between the claim and its end; a change after a step is made once more."""
    source = work("anna")
    archiver, stepped = services.workspace_jobs._archiver, list[int]()
    clock = services.store.clock
    [known] = services.storage.workspaces()

    def read(size: int) -> None:
        if not stepped:
            stepped.append(size)
            clock._told.version = -1  # as if this thread got an older time

    archiver.archive(known, Path(source).parent / "a.tar", actor=KIM, progress=read)
    assert stepped and services.storage.workspaces()[0].busy == ""
    assert [some.action for some in services.audit.trail()] == ["archive workspace"]


def test_running_archive_is_cancelled_and_leaves_nothing(
    services: Services, work: Callable[[str], str]
) -> None:
    source, held = work("anna"), archive_with(services, Held)
    jobs = services.workspace_jobs
    job = jobs.start_archive(source, actor=KIM)
    assert held.reading.wait(60)
    [part] = jobs.folder.iterdir()
    assert part.name.startswith(".")
    assert jobs.cancel(source, actor="lee")
    assert (jobs.jobs()[0].state, jobs.jobs()[0].is_open) == ("cancelling", True)
    assert not jobs.cancel(source, actor="lee"), "it was told already"
    held.gate.set()
    done = ended(services, job)
    assert (done.state, done.error) == ("cancelled", "")
    assert list(jobs.folder.iterdir()) == [] and jobs.archives() == []
    assert (Path(source) / "note").read_bytes() == b"hello"
    assert services.storage.workspaces()[0].busy == ""
    [entry] = services.audit.trail()
    assert (entry.actor, entry.action, entry.subject) == ("lee", "cancel archive", source)
    with pytest.raises(WorkspaceBusy, match=r"No archive of .* is being made"):
        jobs.cancel(source, actor="lee")
    assert ended(services, jobs.start_archive(source, actor=KIM)).state == "done"


def test_archive_that_is_read_back_is_cancelled_too(
    services: Services, work: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To check what was written takes as long as to write it."""
    source, jobs = work("anna"), services.workspace_jobs
    monkeypatch.setattr(archives_module, "NOTICED_AFTER", 0.0)
    checked = list[bool]()

    def check(part: Path, watch: Watch) -> ArchiveContents:
        checked.append(jobs.cancel(source, actor=KIM))
        return check_archive(part, watch)

    monkeypatch.setattr(directories_module, "check_archive", check)
    monkeypatch.setattr(services.storage, "finish_archive", lambda source: checked.append(False))
    done = ended(services, jobs.start_archive(source, actor=KIM))
    assert (done.state, checked) == ("cancelled", [True])
    assert list(jobs.folder.iterdir()) == []


def test_waiting_job_is_cancelled_and_a_running_restore_is_not(
    services: Services, work: Callable[[str], str]
) -> None:
    anna, bert = work("anna"), work("bert")
    jobs = services.workspace_jobs
    name = ended(services, jobs.start_archive(bert, actor=KIM)).archive
    (Path(bert) / "note").unlink()
    held = archive_with(services, Held)
    jobs = services.workspace_jobs
    first = jobs.start_archive(anna, actor=KIM)
    assert held.reading.wait(60)
    second = jobs.start_restore(name, bert, actor=KIM)
    assert jobs.cancel(bert, actor=KIM)
    assert ended(services, second).state == "cancelled"
    assert services.audit.trail()[0].action == "cancel restore"
    third = jobs.start_restore(name, bert, actor=KIM)
    held.gate.set()
    assert {ended(services, job).state for job in (first, third)} == {"done"}
    assert (Path(bert) / "note").read_bytes() == b"hello"

    (Path(bert) / "note").unlink()
    refused = list[WorkspaceBusy]()

    def restore(known: Workspace, file: Path, **_: object) -> tuple[ArchiveContents, str]:
        with pytest.raises(WorkspaceBusy, match="cannot be cancelled") as told:
            jobs.cancel(known.source, actor=KIM)
        refused.append(told.value)
        return check_archive(file), ""

    object.__setattr__(held, "restore", restore)
    assert ended(services, jobs.start_restore(name, bert, actor=KIM)).state == "done"
    assert len(refused) == 1


def test_either_the_cancel_or_the_end_wins(
    services: Services,
    work: Callable[[str], str],
    rounds: Rounds,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two cancel at the moment when the archive is about to get its name."""
    source, jobs = work("anna"), services.workspace_jobs
    finish, count = services.storage.finish_archive, rounds(100)
    gate = threading.Barrier(3)

    def finish_at_once(source: str) -> None:
        gate.wait(60)
        finish(source)

    def cancel(_: int) -> bool:
        gate.wait(60)
        return jobs.cancel(source, actor=KIM)

    monkeypatch.setattr(services.storage, "finish_archive", finish_at_once)
    for _ in range(count):
        before = len(jobs.archives())
        job = jobs.start_archive(source, actor=KIM)
        won = at_once(2, cancel).count(True)
        done = ended(services, job)
        assert (done.state, won) in {("cancelled", 1), ("done", 0)}
        assert len(jobs.archives()) - before == (not won)
        assert [each.name for each in jobs.folder.iterdir() if each.name.startswith(".")] == []
        assert services.storage.workspaces()[0].busy == ""
        Clock.of(services).forward(seconds=1)  # which is in an archive's name
    trail = [some.action for some in services.audit.trail()]
    assert trail.count("cancel archive") + trail.count("archive workspace") == count


def test_database_decides_between_cancel_and_end(
    make: Make, services: Services, work: Callable[[str], str], rounds: Rounds
) -> None:
    source = work("anna")
    other = make().storage
    for _ in range(rounds(200)):
        services.storage.claim_workspace(source, ARCHIVING)

        def act(number: int) -> str:
            if number % 2:
                other.finish_archive(source)
                return "finish"
            return "cancel" if services.storage.cancel_archive(source, actor=KIM) else "late"

        found = at_once(2, act)
        [winner] = [each for each in found if isinstance(each, str)]
        [loser] = [each for each in found if not isinstance(each, str)]
        assert isinstance(loser, ArchiveCancelled if winner == "cancel" else WorkspaceBusy)
        services.storage.free_workspace(source)


def test_unlock_removes_what_a_killed_process_left_unfinished(
    services: Services, work: Callable[[str], str]
) -> None:
    source, jobs = work("anna"), services.workspace_jobs
    services.storage.claim_workspace(source, ARCHIVING)
    assert services.storage.cancel_archive(source, actor=KIM)
    jobs.folder.mkdir()
    (jobs.folder / f".{2**22 + 1}.anna.tar.gz").write_bytes(b"half")  # above any process's id
    (jobs.folder / "older.tar.gz").write_bytes(b"whole")
    with pytest.raises(WorkspaceBusy, match=f"{CANCELLING}. If that was killed, unlock it"):
        jobs.start_archive(source, actor=KIM)
    assert jobs.unlock(source, actor=KIM)
    assert [each.name for each in jobs.folder.iterdir()] == ["older.tar.gz"]
    assert ended(services, jobs.start_archive(source, actor=KIM)).state == "done"


class Broken(BaseHTTPRequestHandler):
    """An engine that answers every question with an error."""

    def do_GET(self) -> None:
        self.send_response(500)
        self.end_headers()
        self.wfile.write(b'{"message": "layer store: 0xc000"}')

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def broken_engine() -> Iterator[Callable[[], docker.APIClient]]:
    """How to reach one."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Broken) as server:
        threading.Thread(target=server.serve_forever).start()
        yield lambda: docker.APIClient(f"tcp://127.0.0.1:{server.server_port}", version="1.43")
        server.shutdown()


def test_error_of_the_engine_or_the_system_is_a_sentence_and_its_words_are_in_the_log(
    services: Services,
    work: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source, jobs = work("anna"), services.workspace_jobs

    def fails(begin: Callable[[], WorkspaceJob], sentence: str, raw: str = "") -> None:
        caplog.clear()
        with caplog.at_level(logging.WARNING, services.log.name):
            failed = ended(services, begin())
        assert failed.state == "failed" and sentence in failed.error
        if raw:
            assert raw not in failed.error and raw in caplog.text
        assert services.storage.workspaces()[0].busy == ""

    def archive() -> WorkspaceJob:
        return services.workspace_jobs.start_archive(source, actor=KIM)

    made = jobs.folder / ended(services, archive()).archive
    file = made.rename(made.with_name("anna.tar.gz"))

    def restore() -> WorkspaceJob:
        return services.workspace_jobs.start_restore(file.name, source, actor=KIM)

    with monkeypatch.context() as patch:
        patch.setattr(archives_module, "KEPT_FREE", 2**60)
        fails(archive, "have to stay free")
        assert [*jobs.folder.iterdir()] == [file]

    with monkeypatch.context() as patch:
        patch.setenv("PATH", "/nowhere")
        fails(archive, "tar could not be started. Install it", "No such file or directory")

    whole = file.read_bytes()
    file.write_bytes(whole[:-20])
    fails(restore, f"{file} is damaged or cut short. Choose another", "Compressed file ended")
    file.write_bytes(whole)

    folder = jobs.folder.rename(jobs.folder.with_name("moved"))
    jobs.folder.write_bytes(b"not a folder")
    fails(archive, f"{jobs.folder} cannot be used as the folder of archives", "File exists")
    jobs.folder.unlink()
    folder.rename(jobs.folder)

    with broken_engine() as connect:
        archiver = replace(jobs._archiver, connect=connect, uses_docker=True)
        services.workspace_jobs = WorkspaceJobs(archiver, jobs.folder, services.time, services.log)
        fails(archive, "The container engine", "0xc000")


HELD = """
import os, time
from gpuspawner.storage import archives

def counted(chunks, progress, known=archives._counted):
    for chunk in known(chunks, progress):
        while not os.path.exists("go"):
            time.sleep(0.01)
        yield chunk

archives._counted = counted
"""
"""The service archives nothing beyond the first bytes before there is a file ``go``."""


def test_service_that_ends_leaves_the_workspace_locked_and_no_archive(
    processes: None, tmp_path: Path
) -> None:
    """As the command does when it is killed: an admin unlocks it, and archives anew.

    The service is killed while it cancels (its first bytes are held, so it cannot notice), and
    once ended as by systemd.
    """
    folder = tmp_path / "members" / "anna"
    folder.mkdir(parents=True)
    (folder / "huge").write_bytes(os.urandom(3_000_000))
    local = {"GPUDockerSpawner": {"gpu_injection": "process"}}
    source, archives = str(folder), tmp_path / "gpuspawner_archives"
    started = ServiceProcess(tmp_path, local, before=HELD)
    with started as service, services_on(service.database_url) as services:
        services.storage.use_workspace(source, "anna", None)

        def ask(what: str) -> requests.Response:
            return service.ask("POST", f"api/workspaces/{what}", ADMIN, json={"workspace": source})

        def job() -> dict[str, object]:
            answer = service.ask("GET", "api/workspaces/jobs", ADMIN)
            return dict(answer.json()["jobs"][0])

        def end_in_the_middle(how: signal.Signals, *, cancels: bool) -> None:
            begun = ask("archive")
            assert begun.ok, begun.text
            wait_for(lambda: job()["bytes"], "its first bytes")
            assert service.process is not None
            if cancels:
                for changed in (True, False):
                    told = ask("cancel").json()
                    assert told == {"workspace": source, "changed": changed}
                assert job()["state"] == "cancelling"
            service.process.send_signal(how)
            service.process.wait()
            assert not (archives / begun.json()["archive"]).exists()
            assert len(list(archives.iterdir())) == 1
            claim = CANCELLING if cancels else ARCHIVING
            assert services.storage.workspaces()[0].busy == claim

            service.start()
            told = service.ask("GET", "api/workspaces", ADMIN).json()
            assert (told["jobs"], told["archives"]) == ([], [])
            assert told["workspaces"][0]["locked"] == claim
            refused = ask("archive")
            assert refused.status_code == 409
            assert "already being processed" in refused.json()["message"]
            assert ask("unlock").json() == {"workspace": source, "changed": True}
            assert list(archives.iterdir()) == []

        end_in_the_middle(signal.SIGKILL, cancels=True)
        end_in_the_middle(signal.SIGTERM, cancels=False)
        (folder / "huge").write_bytes(b"small")
        idle = ask("cancel")
        assert idle.status_code == 409 and "nothing was cancelled" in idle.json()["message"]
        (tmp_path / "go").touch()
        ask("archive").raise_for_status()
        wait_for(lambda: job()["state"] == "done", "the archive")
        assert [each.name for each in archives.iterdir()] == [job()["archive"]]
