"""What processes do that race for leases and credits, and how to start several at once."""

from __future__ import annotations

import os
import random
import signal
import struct
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from gpuspawner.core.errors import GPUSpawnerError, HostFull, NoDeviceFree
from gpuspawner.db import audit
from gpuspawner.db import engine as db_engine
from gpuspawner.leases.models import Lease, Request, ServerRef, Sharing, Terms
from gpuspawner.services import Services
from tests.support.brokers import T0, Clock, acquire, open_services, running
from tests.support.processes import PATIENCE, REPO


class Racer(ForkServerProcess):
    """A process of its own, as hub, service and CLI are."""

    def start(self) -> None:
        start_server()
        super().start()


class RacerContext(ForkServerContext):
    """What starts racers: forked from one that has done the imports and nothing else."""

    Process = Racer


FORKSERVER = RacerContext()


@cache
def start_server() -> None:
    """Start what racers are forked from.

    This server finds modules only by PYTHONPATH. What it cannot import, each racer has to, which
    takes a second of processor time.
    """
    names = ("racers", "racing_line", "sickness", "spending")
    FORKSERVER.set_forkserver_preload([f"tests.support.{name}" for name in names])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(REPO))
        forkserver.ensure_running()


FAILED = "its start failed"
"""Why a lease ended that cost nothing although it had been charged."""

TWO_T4 = "simulated:2xT4"

MOST_TRIES = 5000
"""Rounds after which a racer gives up to see what the others do."""

FAST = 3600
"""How many seconds of the simulated clock a real one lasts: an hour costs something."""


def together(*each: tuple[Any, ...]) -> list[Any]:
    """Call ``work(gate, *arguments)`` for each, in processes of their own; what they returned.

    ``gate`` lets them begin at the same instant.
    """
    gate, pipes, workers = FORKSERVER.Barrier(len(each)), [], []
    for work, *arguments in each:
        ours, theirs = FORKSERVER.Pipe()
        worker = FORKSERVER.Process(
            target=_answer, args=(theirs, work, gate, arguments), daemon=True
        )
        worker.start()
        theirs.close()
        pipes.append(ours)
        workers.append(worker)
    answers = [_receive(pipe) for pipe in pipes]
    for worker in workers:
        worker.join(timeout=120)
    if failures := [answer for well, answer in answers if not well]:
        raise RuntimeError("\n".join(["some racers failed:", *failures]))
    return [answer for _, answer in answers]


def _patiently(work: Any, *arguments: Any) -> Any:
    """Work, and wait for others' locks as long as it takes: any of them may have to pause."""
    db_engine.BUSY_SECONDS = 60.0 * PATIENCE
    return work(*arguments)


def _answer(pipe: Connection, work: Any, gate: Barrier, arguments: list[Any]) -> None:
    try:
        pipe.send((True, _patiently(work, gate, *arguments)))
    except Exception:
        gate.abort()
        pipe.send((False, traceback.format_exc()))


def _receive(pipe: Connection) -> tuple[bool, Any]:
    if not pipe.poll(120 * PATIENCE):
        return False, "one did not come home"
    answer: tuple[bool, Any] = pipe.recv()
    return answer


class Victim:
    """A process in which ``work(ready, *arguments)`` goes on until it is killed.

    ``work`` says through ``ready`` when it begins, and maybe after each round.
    """

    def __init__(self, work: Any, *arguments: Any) -> None:
        self._ready, theirs = FORKSERVER.Pipe()
        everything = (work, theirs, *arguments)
        self._process = FORKSERVER.Process(target=_patiently, args=everything, daemon=True)
        self._process.start()

    def wait_round(self) -> None:
        """Wait until it has begun, or has had one more round."""
        assert self._ready.poll(60 * PATIENCE) and self._ready.recv()

    def kill(self) -> None:
        """Kill it where it is; it must have been alive up to now."""
        assert self._process.pid is not None and self._process.is_alive()
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.join(timeout=120)
        self._ready.close()


def outcome(attempt: Callable[[], Any]) -> str:
    """``lease``, or the name of the refusal."""
    try:
        attempt()
    except GPUSpawnerError as error:
        return type(error).__name__
    return "lease"


# What racers do.


def many_ask(gate: Barrier, url: str, prefix: str, count: int) -> list[str]:
    """``count`` members ask for a device at once, on as many threads as a hub has."""
    services = open_services(url)
    services.monitoring.overview()
    gate.wait(120)
    users = [f"{prefix}-{number}" for number in range(count)]
    asked = [services.store.executor.submit(acquire, services, user) for user in users]
    answers = [outcome(future.result) for future in asked]
    services.store.close()
    return answers


def many_reserve(
    gate: Barrier, url: str, prefix: str, count: int, settings: dict[str, Any]
) -> list[str]:
    """``count`` members ask at once for memory and CPU, every third one for a device, too; who got
    it gives it back and asks once more."""
    services = open_services(url, **settings)
    services.monitoring.overview()
    gate.wait(120)

    def reserve(number: int) -> list[str]:
        answers = []
        for _ in range(2):
            try:
                lease = acquire(
                    services,
                    f"{prefix}-{number}",
                    devices=int(number % 3 == 0),
                    host_memory_bytes=(1 + number % 4) * 2**30,
                    host_milli_cpus=500 * (1 + number % 3),
                )
            except GPUSpawnerError as error:
                answers.append(type(error).__name__)
                continue
            answers.append("lease")
            if number % 2:
                services.leases.release(lease.id, reason="raced")
        return answers

    found = list(services.store.executor.map(reserve, range(count)))
    services.store.close()
    return [answer for answers in found for answer in answers]


def some_always_ask(
    gate: Barrier, url: str, prefix: str, asked: Any, done: Any, settings: dict[str, Any]
) -> list[str]:
    """Ask for 4 GB until it is done, one server after another, and tell ``asked`` of each.

    Who gets nothing gives the oldest lease back. Returns what was reserved beyond the budget.
    """
    services = open_services(url, **settings)
    budget = services.leases.budget
    assert budget is not None
    held: deque[str] = deque()
    wrong = []
    gate.wait(120)
    for number in range(MOST_TRIES):
        if done.is_set():
            break
        try:
            lease = acquire(services, f"{prefix}-{number}", 0, host_memory_bytes=4 * 2**30)
            held.append(lease.id)
        except HostFull:
            if held:
                services.leases.release(held.popleft(), reason="for others")
        reserved = services.leases.host_reserved()
        if not reserved.fits(budget.total):
            wrong.append(str(reserved))
        asked.release()
    services.store.close()
    return wrong


def one_restarts(
    gate: Barrier, url: str, user: str, times: int, asked: Any, done: Any, settings: dict[str, Any]
) -> list[str]:
    """A server with a device and 16 GB restarts with them; how each start went.

    Between its stop and its start, others ask at least 24 times.
    """
    services = open_services(url, **settings)
    lease = running(services, user, host_memory_bytes=16 * 2**30)
    gate.wait(120)
    answers = []
    try:
        for _ in range(times):
            services.restarts.tell_lost(lease.id)
            services.restarts.restart(lease.id, actor=user)
            services.leases.release(lease.id, reason="stopped")
            while asked.acquire(block=False):
                pass
            assert all(asked.acquire(timeout=60) for _ in range(24))
            lease = running(services, user, host_memory_bytes=16 * 2**30)
            answers.append("lease")
    except GPUSpawnerError as error:
        answers.append(f"{type(error).__name__}: {error}")
    finally:
        done.set()
        services.store.close()
    return answers


def one_asks_again_and_again(
    gate: Barrier, url: str, user: str, server: str, rounds: int, settings: dict[str, Any]
) -> list[str]:
    """Ask in each round at the same moment as the others; who got it gives it back."""
    services = open_services(url, **settings)
    services.ledger.open_account(user)
    answers = []
    for _ in range(rounds):
        gate.wait(120)
        try:
            lease = acquire(services, user, server=server)
            answers.append("lease")
        except GPUSpawnerError as error:
            answers.append(f"{type(error).__name__}: {error}")
            lease = None
        gate.wait(120)
        if lease:
            services.leases.release(lease.id, reason="the next round")
    services.store.close()
    return answers


class FastClock:
    """Real time, :data:`FAST` times as fast, and the same in every process."""

    def __init__(self, began: float) -> None:
        self.began = began

    def __call__(self) -> datetime:
        return T0 + timedelta(seconds=(time.time() - self.began) * FAST)


class SharedClock:
    """A clock that the test sets, the same in every process: seconds since T0, kept in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.set(0.0)

    def set(self, seconds: float) -> None:
        """Set the time; the write is shorter than anything that a reader could see half of."""
        with self.path.open("r+b" if self.path.exists() else "wb") as file:
            file.write(struct.pack("d", seconds))

    def __call__(self) -> datetime:
        return T0 + timedelta(seconds=struct.unpack("d", self.path.read_bytes())[0])


def fast_services(url: str, began: float) -> Services:
    """Four devices at 4 credits an hour, on the fast clock."""
    return paid_services(url, FastClock(began))


def paid_services(url: str, clock: Callable[[], datetime]) -> Services:
    """Four devices at 4 credits an hour."""
    return open_services(url, clock=clock, gpu_rates={"*": 4}, opening_grant=10_000)


def lives_of_a_server(
    gate: Barrier, url: str, began: float, user: str, server: str, count: int
) -> list[int]:
    """Start and stop a server ``count`` times; what each life cost, by its start and end."""
    services = fast_services(url, began)
    gate.wait(120)
    costs = []
    for _ in range(count):
        try:
            lease = acquire(services, user, server=server)
        except NoDeviceFree:
            continue
        services.leases.confirm(lease.id)
        lease = services.leases.release(lease.id, ended_at=services.clock(), reason="stopped")
        assert lease.started_at and lease.ended_at
        micros = (lease.ended_at - lease.started_at) // timedelta(microseconds=1)
        costs.append(lease.rate * micros // 3_600_000_000)
    services.store.close()
    return costs


def charges(gate: Barrier, url: str, began: float, count: int) -> int:
    """Charge everybody ``count`` times; how many charges there were."""
    services = fast_services(url, began)
    gate.wait(120)
    charged = sum(services.ledger.charge_all() for _ in range(count))
    services.store.close()
    return charged


def work_until_killed(ready: Connection, url: str, began: float, user: str) -> None:
    """Everything that writes, as fast as it goes, for ever; ``ready`` is told of each round."""
    services = fast_services(url, began)
    services.ledger.open_account(user)
    for leftover in services.leases.open_leases():
        services.leases.release(leftover.id, ended_at=services.clock(), reason="its hub was killed")
    ready.send("working")
    chance = random.Random(user)
    while True:
        leases = [acquire(services, user, 2, server=str(number)) for number in range(2)]
        for lease in leases:
            services.leases.confirm(lease.id, f"container-{lease.id}")
        services.ledger.charge_all()
        services.ledger.grant(f"member:{user}", 1_000_000, actor="admin", reason="gift")
        for lease in leases:
            failed = chance.random() < 0.3
            reason = FAILED if failed else "stopped"
            services.leases.release(
                lease.id, ended_at=services.clock(), reason=reason, failed=failed
            )
        ready.send("working")


WARNINGS = tuple(range(30, 601, 30))
"""Minutes before a session's end."""


def look_after_sessions_until_killed(ready: Connection, url: str, clock: SharedClock) -> None:
    """Warn and end whatever is due, as the service does, for ever."""
    services = paid_services(url, clock)
    services.sessions.due_sessions(WARNINGS)  # the first look takes longer than most live
    ready.send("working")
    while True:
        due = services.sessions.due_sessions(WARNINGS)
        for lease in due.warn:
            services.sessions.warn_session(lease.id, WARNINGS)
        for lease in due.over:
            services.sessions.end_session(lease.id)
        if not due.warn and not due.over:
            time.sleep(0.002)  # whoever sets the clock needs the processor


class KeptLeases:
    """Leases that threads take and give back, the oldest first."""

    def __init__(self, services: Services) -> None:
        self._leases = services.leases
        self._ids: deque[str] = deque()

    def keep(self, lease: Lease, most: int) -> None:
        """Keep a lease; give one back if there are more than ``most`` now."""
        self._ids.append(lease.id)
        if len(self._ids) > most:
            self.give_back()

    def give_back(self) -> None:
        """Release the oldest lease, if there is one."""
        with suppress(IndexError):  # another thread gave the last one back
            self._leases.release(self._ids.popleft(), reason="for others")


def shares_and_whole_devices(
    gate: Barrier, url: str, seed: int, count: int, settings: dict[str, Any]
) -> tuple[list[str], list[str]]:
    """Eight members ask ``count`` times for a share, a device or two, on a hub's threads.

    A share has one slot or three.

    The oldest lease is given back when there are three, or for somebody who got none. Returns the
    answers, and what was wrong with the devices of open leases after any of the grants.
    """
    services = open_services(url, **settings)
    services.monitoring.overview()
    chance = random.Random(seed)
    requests = {
        "slot": Request(devices=1, sharing=Sharing.SLOT),
        "three slots": Request(devices=1, sharing=Sharing.SLOT, memory_bytes=10 * 10**9),
        "whole": Request(devices=1),
        "two": Request(devices=2),
    }
    asked = [
        (f"member{chance.randrange(8)}", chance.choice(["slot", *requests])) for _ in range(count)
    ]
    kept = KeptLeases(services)
    wrong: list[str] = []

    def one(number: int) -> str:
        user, name = asked[number]
        server = ServerRef(user, f"{seed}-{number}")
        try:
            lease = services.leases.grant(server, requests[name], engine="docker")
        except GPUSpawnerError as error:
            kept.give_back()
            return f"{type(error).__name__}: {error}"
        wrong.extend(services.store.run(shared_wrongly))
        kept.keep(lease, most=2)
        return name

    gate.wait(120)
    answers = list(services.store.executor.map(one, range(count)))
    services.store.close()
    return answers, wrong


def members_and_others(
    gate: Barrier, url: str, seed: int, count: int, settings: dict[str, Any]
) -> tuple[list[str], list[str]]:
    """Members of vision-lab and others ask ``count`` times for a device, on a hub's threads.

    A third of them for preemptible runs. The oldest lease is given back when there are two, or for
    somebody who got none. Returns the answers, and who got a device that is not theirs.
    """
    services = open_services(url, **settings)
    services.monitoring.overview()
    chance = random.Random(seed)
    asked = [(chance.random() < 0.5, chance.random() < 0.33) for _ in range(count)]
    kept = KeptLeases(services)
    wrong: list[str] = []

    def one(number: int) -> str:
        is_lab, preemptible = asked[number]
        terms = Terms(groups=frozenset({"vision-lab"} if is_lab else ()), preemptible=preemptible)
        server, request = ServerRef(f"{seed}-{number}"), Request(devices=1)
        try:
            lease = services.leases.grant(server, request, engine="docker", terms=terms)
        except GPUSpawnerError as error:
            kept.give_back()
            return type(error).__name__
        model = lease.devices[0].model.partition("-")[0]
        who = [model, *(["lab"] if is_lab else []), *(["preemptible"] if preemptible else [])]
        if model == "A100" and len(who) == 1:
            wrong.append(f"{lease.server} has a device of vision-lab")
        kept.keep(lease, most=1)
        return " ".join(who)

    gate.wait(120)
    answers = list(services.store.executor.map(one, range(count)))
    services.store.close()
    return answers, wrong


def slots_of_changing_devices(
    gate: Barrier, url: str, seed: int, done: Any
) -> tuple[set[int], list[str]]:
    """Take and return slots of devices whose number of slots the hub changes meanwhile.

    Until three numbers were seen. Returns these numbers (0 for a refusal), and what was wrong.
    """
    clock = Clock()
    services = open_services(url, clock, device_source=TWO_T4, shared_devices={"T4": 4})
    services.watch.changes_slots = False  # it has the numbers from the hub's table
    found, wrong = set[int](), list[str]()
    gate.wait(120)
    for number in range(MOST_TRIES):
        if number > 30 and len(found) > 2:
            break
        clock.forward(minutes=2)  # it reads the table again
        try:
            lease = acquire(services, f"m{seed}", server=f"{number}", sharing=Sharing.SLOT)
        except GPUSpawnerError as error:
            found.add(0)
            if not isinstance(error, NoDeviceFree):
                wrong.append(error.message)
            continue
        wrong.extend(services.store.run(shared_wrongly))
        found.add(lease.devices[0].slots)
        services.leases.release(lease.id, reason="stopped")
    with done.get_lock():
        done.value += 1
    services.store.close()
    return found, wrong


def hub_changes_slots(gate: Barrier, url: str, done: Any, others: int) -> int:
    """Want other numbers of slots until the others are done; how often a device got one."""
    services = open_services(url, device_source=TWO_T4, shared_devices={"T4": 4})
    before = [device.slots for device in services.devices.look().devices]
    changed = number = 0
    gate.wait(120)
    end = time.monotonic() + 60 * PATIENCE
    while done.value < others and time.monotonic() < end:
        number += 1
        services.watch.shared = {"T4": 2 + number % 3}
        now = [device.slots for device in services.devices.look(fresh=True).devices]
        changed += sum(one != other for one, other in zip(before, now, strict=True))
        before = now
    services.store.close()
    return changed


def shared_wrongly(connection: sa.Connection) -> list[str]:
    """What is wrong with the devices of open leases: one on a slot, whole or in slots."""
    checks = (audit.CHECKS[name] for name in ("one lease per slot", "sharing"))
    return [problem for check in checks for problem in check(connection)]
