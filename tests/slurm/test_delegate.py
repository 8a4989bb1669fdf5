"""Tickets as jobs, raced and killed. Real: Slurm with two nodes, processes, kill -9."""

from __future__ import annotations

import itertools
import os
import pwd
import random
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from multiprocessing import get_context
from pathlib import Path
from typing import ClassVar

import pytest

from gpuspawner.core.errors import SlurmRefused, SlurmUnavailable
from gpuspawner.engines.base import LABEL_LEASE, LABEL_MEMBER, LABEL_SERVER
from gpuspawner.leases.models import Request, ServerRef
from gpuspawner.queue import repository as queue_repository
from gpuspawner.queue.models import Ticket, Turn
from gpuspawner.slurm import accounts as slurm_accounts
from gpuspawner.slurm import scheduler
from gpuspawner.slurm.cluster import Cluster
from gpuspawner.slurm.engine import LABEL_JOB, SlurmEngine
from gpuspawner.slurm.priority import PriorityOverrides
from gpuspawner.slurm.programs import JobSpec, Slurm
from gpuspawner.slurm.scheduler import EVERY, LOG, SAVED, SETTLING, SOON, SlurmDelegate
from tests.support import images
from tests.support.processes import wait_for
from tests.support.slurm_broker import asked, opened
from tests.support.slurm_cluster import SlurmCluster
from tests.support.slurm_daemons import as_user, program
from tests.support.slurm_hub import described


@pytest.fixture
def delegate(cluster: SlurmCluster, ann: str) -> SlurmDelegate:
    return SlurmDelegate(described(cluster), Slurm(conf=str(cluster.conf), seconds=60))


def ticket(number: int, *, age: float = 0.0) -> Ticket:
    return Ticket(
        id=f"{number:016x}",
        server=ServerRef("ann", f"s{number}"),
        request=Request(devices=1),
        created_at=datetime.now(timezone.utc) - timedelta(seconds=age),
    )


def devices(delegate: SlurmDelegate, ticket: Ticket) -> tuple[str, ...]:
    turn = delegate.turns().get(ticket.id)
    return turn.uuids if turn else ()


class Noted(Slurm):
    """Also writes down how scancel was called."""

    cancels: ClassVar[list[tuple[str, ...]]] = []

    def run(self, program: str, *words: str, script: str = "") -> str:
        if program == "scancel":
            self.cancels.append(words)
        return Slurm.run(self, program, *words, script=script)


class HandClock:
    """In the place of ``time``: it goes on when it is told to, and not while Slurm is busy."""

    def __init__(self) -> None:
        self._now = time.monotonic()
        self._lock = threading.Lock()

    def monotonic(self) -> float:
        return self._now

    def forward(self, seconds: float) -> None:
        with self._lock:
            self._now += seconds


def look_again(delegate: SlurmDelegate, count: int = 1) -> None:
    """So many looks that begin from now on; the last of them is what turns() goes by."""
    for _ in range(count):
        before = delegate._began

        def looked(before: float = before) -> bool:
            delegate.turns(0)
            return delegate._began > before

        wait_for(looked, "another look")


def names(cluster: SlurmCluster) -> list[str]:
    return sorted(cluster.run("squeue", "-h", "-o", "%j").split())


def test_concurrent_submits_create_one_job_per_ticket(
    delegate: SlurmDelegate, cluster: SlurmCluster
) -> None:
    """Who asks and the rounds race for each of ten tickets: ten jobs."""
    tickets = [ticket(number) for number in range(10)]
    with ThreadPoolExecutor(12) as threads:
        for _ in threads.map(delegate.submit, tickets * 4):
            pass
    assert names(cluster) == [f"gpuspawner-{each.id}" for each in tickets]

    def three() -> list[Turn]:
        turns = list(delegate.turns().values())
        return turns if sum(bool(turn.uuids) for turn in turns) == 3 else []

    turns = wait_for(three, "three that run")
    given = [uuid for turn in turns for uuid in turn.uuids]
    assert len(given) == len(set(given)) == 3
    places = sorted(turn.place for turn in turns if turn.place)
    assert places == list(range(1, 8)) and {turn.of for turn in turns if turn.place} == {7}
    (first,) = (turn.ticket_id for turn in turns if turn.place == 1)
    wait_for(lambda: delegate.turns()[first].start, "Slurm to expect its start")


def test_a_refusal_is_in_slurms_words(delegate: SlurmDelegate, cluster: SlurmCluster) -> None:
    cluster.users.make("eve")
    with pytest.raises(SlurmRefused, match="the user eve has no account there"):
        delegate.submit(replace(ticket(1), server=ServerRef("eve")))
    with pytest.raises(SlurmRefused, match="allows no job longer than 24 h"):
        delegate.submit(replace(ticket(2), seconds=90_000))
    long = JobSpec(name="long", comment="{}", partition="gpu", cpus=1, megabytes=100,
                  gres="gpu:1", minutes=1441, user="ann")  # fmt: skip
    with pytest.raises(SlurmRefused, match=r"(?i)requested time limit is invalid"):
        delegate.slurm.submit(long)
    with pytest.raises(SlurmRefused, match="Invalid job id specified"):
        delegate.slurm.change(999_999, minutes=5)
    with pytest.raises(SlurmRefused, match="Invalid job id specified"):
        delegate.slurm.hold([999_999])


def programs_of(user: str, folder: Path) -> str:
    """A folder with those of Slurm's programs that change something, run as this user."""
    folder.mkdir()
    for name in ("sbatch", "scancel", "scontrol"):
        command = shlex.join(as_user(user, [program(name)]))
        (folder / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n', encoding="utf-8")
        (folder / name).chmod(0o755)
    for name in ("sinfo", "squeue"):
        (folder / name).symlink_to(program(name))
    return str(folder)


def test_hub_without_operator_rights_pauses_only_its_own_jobs(
    delegate: SlurmDelegate, cluster: SlurmCluster, tmp_path: Path
) -> None:
    """A pause ends as it began; places and points are refused, and nothing worse happens."""
    cluster.user("bob")
    slurm = Slurm(
        conf=delegate.slurm.conf, seconds=60, folder=programs_of("bob", tmp_path / "programs")
    )
    one = SlurmDelegate(delegate.cluster, slurm, as_member=False)
    one._hand = PriorityOverrides(slurm, LOG, user=pwd.getpwnam("bob").pw_uid)
    running, last = [ticket(number) for number in range(3)], replace(ticket(10), boost=2.5)
    held = ticket(11)
    for each in (*running, last, held):
        one.submit(each)
    wait_for(lambda: all(devices(one, each) for each in running), "three that run")
    assert set(cluster.run("squeue", "-h", "-o", "%u").split()) == {"bob"}
    cluster.run("scontrol", "hold", cluster.holder(held.id, "%i"))  # nobody lifts it but an admin

    def tended(reason: str, *, paused: bool) -> None:
        """As the rounds of a hub do it, until this is why it waits."""

        def look() -> bool:
            one.turns()
            one.tend([replace(last, position=1), held], paused=paused)
            return cluster.holder(last.id, "%r") == reason

        wait_for(look, f"{reason} to be why it waits", interval=0.5)

    tended("JobHeldUser", paused=True)
    tended("Resources", paused=False)
    assert cluster.holder(held.id, "%r") == "JobHeldAdmin"
    one.cancel(running[0].id)
    wait_for(lambda: devices(one, last), "it to run")


class Doomed(Slurm):
    """Kills its own process so many seconds after it began to submit the last of so many jobs."""

    jobs_left: ClassVar[int] = 0
    delay_seconds: ClassVar[float] = 0.0

    def submit(self, holder: JobSpec) -> None:
        Doomed.jobs_left -= 1
        if not Doomed.jobs_left:
            kill = (os.getpid(), signal.SIGKILL)
            threading.Timer(Doomed.delay_seconds, os.kill, kill).start()
        Slurm.submit(self, holder)


def _submit(cluster: Cluster, tickets: list[Ticket], jobs: int, seconds: float) -> None:
    """Be killed so many seconds after the submit of the last of so many jobs began."""
    Doomed.jobs_left, Doomed.delay_seconds = jobs, seconds
    delegate = SlurmDelegate(cluster, Doomed(conf=cluster.slurm_conf, seconds=60))
    for each in tickets:
        delegate.submit(each)
    if Doomed.jobs_left <= 0:
        signal.pause()  # the kill may come late


def test_interrupted_submits_leave_one_job_per_ticket(
    delegate: SlurmDelegate, cluster: SlurmCluster, chance: random.Random
) -> None:
    """However often a hub is killed while it hands tickets over, each has one job in the end."""
    tickets = [ticket(number, age=60) for number in range(8)]
    ends: list[int | None] = []
    while len(ends) < 5 and (missing := len(tickets) - len({*names(cluster)})):
        told = tickets, chance.randint(1, (missing + 1) // 2), chance.uniform(0, 0.1)
        process = get_context("fork").Process(target=_submit, args=(delegate.cluster, *told))
        process.start()
        process.join()
        ends.append(process.exitcode)
    # The last job of a later one may have been there already, from a submit that was cut off.
    assert ends[0] == -signal.SIGKILL and set(ends) <= {-signal.SIGKILL, 0}, "none failed by itself"
    for each in tickets:
        delegate.submit(each)

    def one_each() -> bool:
        delegate.turns()  # takes back what came through twice
        return names(cluster) == [f"gpuspawner-{each.id}" for each in tickets]

    wait_for(one_each, "one job for each ticket", interval=0.5)


def test_known_jobs_are_cancelled_by_number_others_by_name(
    delegate: SlurmDelegate, cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To find a job by its name, Slurm is asked for everybody's."""
    one = SlurmDelegate(delegate.cluster, Noted(conf=delegate.slurm.conf, seconds=60))
    Noted.cancels.clear()
    tickets = [ticket(number) for number in range(100, 103)]
    for each in tickets:
        one.submit(each)

    def turns() -> list[Turn]:
        found = one.turns(0)
        return [found[each.id] for each in tickets if each.id in found]

    wait_for(lambda: len(turns()) == 3, "a look at all of them")
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(one.cancel, [each.id for each in tickets]))
    numbers = [word for words in Noted.cancels for word in words[1:]]
    assert len(numbers) == 3 and all(number.isdecimal() for number in numbers)
    wait_for(lambda: all(turn.over for turn in turns()), "their ends to be seen")
    assert not names(cluster)
    one.cancel(tickets[0].id)
    assert [word for words in Noted.cancels for word in words[1:]] == numbers, "once is enough"

    last = ticket(103)
    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "time", HandClock())
        one._answered = scheduler.time.monotonic()  # as if a look before it had been just now
        one.submit(last)
        one.cancel(last.id)
    assert Noted.cancels[-1] == ("--quiet", f"--name=gpuspawner-{last.id}")
    wait_for(lambda: not names(cluster), "the last one to go")

    # One that is listed with unknown numbers ends all the same.
    other = ticket(104)
    one.submit(other)
    number = int(wait_for(lambda: cluster.holder(other.id, "%i"), "its job"))
    with suppress(SlurmRefused):
        one.slurm.cancel(999_998, number, 999_999)
    wait_for(lambda: not names(cluster), "it to go")


def test_ticket_marked_last_waits_behind_all_others(
    delegate: SlurmDelegate, cluster: SlurmCluster
) -> None:
    for number in range(3):
        delegate.submit(ticket(number))
    wait_for(lambda: all(devices(delegate, ticket(n)) for n in range(3)), "all devices to be taken")
    first, second = replace(ticket(3), last=True), ticket(4)
    delegate.submit(first)
    delegate.submit(second)

    def places() -> list[int]:
        turns = delegate.turns()
        return [turns[each.id].place for each in (second, first) if each.id in turns]

    wait_for(lambda: places() == [1, 2], "them to stand in the queue")
    for _ in range(2):  # also when it is told again what an admin decided, which is nothing
        delegate.tend([first, second], paused=False)
        look_again(delegate, 2)
        assert places() == [1, 2]


def test_unreachable_controller_does_not_end_jobs(
    delegate: SlurmDelegate, cluster: SlurmCluster
) -> None:
    """While the controller is away nothing has ended, and afterwards all is as it was."""
    one = ticket(1)
    delegate.submit(one)
    given = wait_for(lambda: devices(delegate, one), "its device")
    cluster.save("ann")
    cluster.kill("slurmctld")
    quick = SlurmDelegate(delegate.cluster, Slurm(conf=delegate.slurm.conf, seconds=2))
    with pytest.raises(SlurmUnavailable):
        quick.turns()
    with pytest.raises(SlurmUnavailable):
        quick.submit(ticket(2))
    with pytest.raises(SlurmUnavailable):
        delegate.turns()
    assert delegate.job(one.id) is not None, "what was known of it is not forgotten"

    # It is asked no sooner for who tried to hand something in.
    hasty = SlurmDelegate(delegate.cluster, Slurm(conf=delegate.slurm.conf, seconds=0.5))
    with pytest.raises(SlurmUnavailable):
        hasty.submit(ticket(3))
    with pytest.raises(SlurmUnavailable):
        hasty.turns()
    failed_at = hasty._answered

    def asked_again() -> bool:
        with suppress(SlurmUnavailable):
            hasty.turns()
        return hasty._answered > failed_at

    wait_for(asked_again, "it to be asked again", interval=0.05)
    assert hasty._answered - failed_at >= EVERY
    cluster.restart("slurmctld")

    def again() -> tuple[str, ...]:
        with suppress(SlurmUnavailable):
            return devices(delegate, one)
        return ()

    assert wait_for(again, "an answer") == given


def test_slurm_polling_rate_is_limited_in_the_long_run(
    delegate: SlurmDelegate, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []
    look, clock = SlurmDelegate._look, HandClock()
    monkeypatch.setattr(scheduler, "time", clock)

    def noted(self: SlurmDelegate) -> None:
        looks.append(clock.monotonic())
        look(self)

    monkeypatch.setattr(SlurmDelegate, "_look", noted)
    with ThreadPoolExecutor(8) as threads:
        for _ in threads.map(lambda _: delegate.turns(0), range(40)):
            clock.forward(0.05)
            delegate.turns(0)
    assert len(looks) > 1
    assert all(later - one >= 1.0 for one, later in itertools.pairwise(looks))

    # Who does with an old answer is no reason to ask, also when somebody has just handed in a job.
    delegate.submit(ticket(6))
    clock.forward(SETTLING + SOON)
    before = len(looks)
    delegate.turns(600)
    assert len(looks) == before

    # Who hands in jobs hears of them sooner, and in the long run it is asked no more for that.
    for number in range(6):
        delegate.submit(ticket(number))
        for _ in range(20):
            clock.forward(0.05)
            delegate.turns()
    gaps = [later - one for one, later in itertools.pairwise(looks)]
    assert min(gaps) < 1.0
    assert len(gaps) <= SAVED + (looks[-1] - looks[0]) / EVERY


def test_two_hubs_leave_each_others_jobs_alone(
    delegate: SlurmDelegate, cluster: SlurmCluster, tmp_path: Path
) -> None:
    """What one hub's store knows nothing of is the other's; what nobody waits for any more goes."""
    brokers = [opened(tmp_path / name, cluster) for name in ("one", "two")]
    tickets = [asked(services, "ann", str(n)) for n, services in enumerate(brokers)]
    for services in brokers:
        sees = services.delegation.delegate
        assert sees is not None
        wait_for(lambda sees=sees: {t.id for t in tickets} <= sees.turns().keys(), "both")
    assert [services.delegation.end_deserted() for services in brokers] == [[], []]
    assert names(cluster) == sorted(f"gpuspawner-{each.id}" for each in tickets)
    one, two = brokers
    with one.store.write() as connection:  # as if the hub had died before it could cancel the job
        queue_repository.end_ticket(
            connection, tickets[0].id, one.clock(), "cancelled", "by a test"
        )
    for services in brokers:
        assert isinstance(services.delegation.delegate, SlurmDelegate)
        look_again(services.delegation.delegate)
    assert two.delegation.end_deserted() == []
    assert one.delegation.end_deserted() == [tickets[0].id]
    wait_for(lambda: names(cluster) == [f"gpuspawner-{tickets[1].id}"], "its job to go")
    for services in brokers:
        services.store.close()


def test_many_new_members_are_registered_in_few_calls(
    cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm is told of all of them together, and of none less for one whom it cannot have."""
    services = opened(tmp_path, cluster)
    monkeypatch.setattr(slurm_accounts, "is_system_user", lambda user: user == "course7")
    calls: list[str] = []
    run = Slurm.run

    def noted(self: Slurm, program: str, *words: str, script: str = "") -> str:
        calls.append(program)
        return run(self, program, *words, script=script)

    monkeypatch.setattr(Slurm, "run", noted)
    users = [f"course{number}" for number in range(8)]
    tickets = [replace(ticket(110), server=ServerRef(user)) for user in users]
    with ThreadPoolExecutor(8) as threads:
        admitted = list(threads.map(services.cluster_members.admit_to_cluster, tickets))
    assert [each.account for each in admitted] == [slurm_accounts.EVERYBODY] * 7 + [""]
    found = cluster.run("sacctmgr", "-n", "-P", "show", "assoc", "format=user").split()
    assert {user for user in found if user.startswith("course")} == set(users[:7])
    assert calls.count("sacctmgr") < 7 * len(users), "not one after the other"
    services.store.close()


def test_job_container_is_limited_and_ends_before_the_next_job(
    cluster: SlurmCluster, ann: str
) -> None:
    """Our servers rely on this behaviour of Slurm and Docker."""
    node = cluster.nodes[1]
    job = cluster.hold(ann, "--gres=gpu:h100:1")
    cluster.wait_state(job, "RUNNING")
    parent = cluster.group(job)
    node.contain({LABEL_JOB: str(job)}, cgroup_parent=parent)
    # The job has 100 MB, whatever Docker was told: dd's block of 200 MB is too much.
    greedy = ["sh", "-c", "dd if=/dev/zero of=/dev/null bs=200M count=1"]
    assert node.engine.run(images.SILENT, greedy)[0] == 0
    assert node.engine.run(images.SILENT, greedy, cgroup_parent=parent)[0] == 137
    cluster.wait_state(job, "RUNNING")

    following = cluster.hold(ann, "--gres=gpu:h100:1")
    assert len(node.containers()) == 1
    cluster.run("scancel", str(job))
    cluster.wait_state(following, "RUNNING")
    assert node.containers() == [], "the epilog ended it before the next job had the device"


def test_container_of_an_unknown_job_is_not_ended(
    delegate: SlurmDelegate, cluster: SlurmCluster
) -> None:
    """A container of a job that began after the look, or that a controller has lost, lives on."""
    engine, node = SlurmEngine(delegate), cluster.nodes[0]
    labels = {LABEL_LEASE: "1f", LABEL_MEMBER: "ann", LABEL_SERVER: "", LABEL_JOB: "999999"}
    container = node.contain(labels)
    (seen,) = engine.sightings()
    assert (seen.lease_id, seen.alive) == ("1f", True)
    assert node.containers() == [container]
    assert engine.running() == set(), "nothing of it is promised either"


def test_look_at_an_exited_container_leaves_its_job_and_its_exit_status(
    delegate: SlurmDelegate, cluster: SlurmCluster
) -> None:
    engine, node = SlurmEngine(delegate), cluster.nodes[0]
    one = ticket(104)
    delegate.submit(one)
    wait_for(lambda: devices(delegate, one), "its device")
    job = delegate.job(one.id)
    assert job is not None and job.node == node.name
    labels = {LABEL_LEASE: "3f", LABEL_MEMBER: "ann", LABEL_SERVER: "", LABEL_JOB: str(job.id)}
    container = node.contain(labels)
    node.engine.client.kill(container)
    node.engine.client.wait(container)
    for _ in range(3):
        (seen,) = engine.sightings()
        assert (seen.alive, seen.exit_code) == (True, 137), "its devices are not free"
    cluster.wait_state(job.id, "RUNNING")
    engine.end_job(seen)
    wait_for(lambda: all(not each.alive for each in engine.sightings()), "the end of the job")


@pytest.fixture
def slow_to_lose_nodes(cluster: SlurmCluster) -> Iterator[Callable[[], None]]:
    """From the call on, Slurm gives a silent node up after minutes."""
    yield lambda: cluster.reconfigure(SlurmdTimeout=300)
    cluster.reconfigure(SlurmdTimeout=10)


def test_look_does_not_wait_for_an_unreachable_node(
    delegate: SlurmDelegate, cluster: SlurmCluster, slow_to_lose_nodes: Callable[[], None]
) -> None:
    """What ran there runs on as far as anybody knows, until Slurm says that the node is lost."""
    engine, node = SlurmEngine(delegate), cluster.nodes[1]
    one = replace(ticket(105), request=Request(devices=1, model="H100"))
    delegate.submit(one)
    wait_for(lambda: devices(delegate, one), "its device")
    job = delegate.job(one.id)
    assert job is not None
    labels = {LABEL_LEASE: "2f", LABEL_MEMBER: "ann", LABEL_SERVER: "", LABEL_JOB: str(job.id)}
    node.contain(labels)
    wait_for(lambda: engine.running() == {"2f"}, "it to be seen")
    slow_to_lose_nodes()
    cluster.cut(node)

    def look() -> set[str] | None:
        found = engine.running()
        return None if engine._listing[node.name].done() else found

    assert wait_for(look, "a look that did not wait for the node") == {"2f"}
    cluster.heal(node)
    wait_for(lambda: engine.running() and not engine._silent, "it to answer again")
