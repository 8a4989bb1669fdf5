"""What processes do that race for leases and credits, and how to start several at once."""

from __future__ import annotations

import multiprocessing
import random
import struct
import time
import traceback
from collections.abc import Callable
from datetime import datetime, timedelta
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from gpuspawner.core.errors import GPUSpawnerError, NoDeviceFree
from gpuspawner.services import Broker
from tests.support.brokers import T0, acquire, open_broker

FORKSERVER = multiprocessing.get_context("forkserver")
"""Every racer is a process of its own, as hub, service and CLI are: forked from one that has done
the imports and nothing else."""
FORKSERVER.set_forkserver_preload(
    [f"tests.support.{name}" for name in ("racers", "racing_line", "sickness", "spending")]
)

FAILED = "its start failed"
"""Why a lease ended that cost nothing although it had been charged."""

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


def _answer(pipe: Connection, work: Any, gate: Barrier, arguments: list[Any]) -> None:
    try:
        pipe.send((True, work(gate, *arguments)))
    except Exception:
        gate.abort()
        pipe.send((False, traceback.format_exc()))


def _receive(pipe: Connection) -> tuple[bool, Any]:
    if not pipe.poll(120):
        return False, "one did not come home"
    answer: tuple[bool, Any] = pipe.recv()
    return answer


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
    broker = open_broker(url)
    broker.overview()
    gate.wait(120)
    users = [f"{prefix}-{number}" for number in range(count)]
    asked = [broker.store.executor.submit(acquire, broker, user) for user in users]
    answers = [outcome(future.result) for future in asked]
    broker.store.close()
    return answers


def one_asks_again_and_again(
    gate: Barrier, url: str, user: str, server: str, rounds: int, settings: dict[str, Any]
) -> list[str]:
    """Ask in each round at the same moment as the others; who got it gives it back."""
    broker = open_broker(url, **settings)
    broker.ledger.open_account(user)
    answers = []
    for _ in range(rounds):
        gate.wait(120)
        try:
            lease = acquire(broker, user, server=server)
            answers.append("lease")
        except GPUSpawnerError as error:
            answers.append(f"{type(error).__name__}: {error}")
            lease = None
        gate.wait(120)
        if lease:
            broker.release(lease.id, reason="the next round")
    broker.store.close()
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


def fast_broker(url: str, began: float) -> Broker:
    """Four devices at 4 credits an hour, on the fast clock."""
    return paid_broker(url, FastClock(began))


def paid_broker(url: str, clock: Callable[[], datetime]) -> Broker:
    """Four devices at 4 credits an hour."""
    return open_broker(url, clock=clock, gpu_rates={"*": 4}, opening_grant=10_000)


def lives_of_a_server(
    gate: Barrier, url: str, began: float, user: str, server: str, count: int
) -> list[int]:
    """Start and stop a server ``count`` times; what each life cost, by its start and end."""
    broker = fast_broker(url, began)
    gate.wait(120)
    costs = []
    for _ in range(count):
        try:
            lease = acquire(broker, user, server=server)
        except NoDeviceFree:
            continue
        broker.confirm(lease.id)
        lease = broker.release(lease.id, ended_at=broker.clock(), reason="stopped")
        assert lease.started_at and lease.ended_at
        micros = (lease.ended_at - lease.started_at) // timedelta(microseconds=1)
        costs.append(lease.rate * micros // 3_600_000_000)
    broker.store.close()
    return costs


def charges(gate: Barrier, url: str, began: float, count: int) -> int:
    """Charge everybody ``count`` times; how many charges there were."""
    broker = fast_broker(url, began)
    gate.wait(120)
    charged = sum(broker.ledger.charge_all() for _ in range(count))
    broker.store.close()
    return charged


def work_until_killed(ready: Connection, url: str, began: float, user: str) -> None:
    """Everything that writes, as fast as it goes, for ever; ``ready`` is told of each round."""
    broker = fast_broker(url, began)
    broker.ledger.open_account(user)
    for leftover in broker.open_leases():
        broker.release(leftover.id, ended_at=broker.clock(), reason="its hub was killed")
    ready.send("working")
    chance = random.Random(user)
    while True:
        leases = [acquire(broker, user, 2, server=str(number)) for number in range(2)]
        for lease in leases:
            broker.confirm(lease.id, f"container-{lease.id}")
        broker.ledger.charge_all()
        broker.ledger.grant(f"member:{user}", 1_000_000, actor="admin", reason="gift")
        for lease in leases:
            failed = chance.random() < 0.3
            reason = FAILED if failed else "stopped"
            broker.release(lease.id, ended_at=broker.clock(), reason=reason, failed=failed)
        ready.send("working")


WARNINGS = tuple(range(30, 601, 30))
"""Minutes before a session's end."""


def look_after_sessions_until_killed(ready: Connection, url: str, clock: SharedClock) -> None:
    """Warn and end whatever is due, as the service does, for ever."""
    broker = paid_broker(url, clock)
    ready.send("working")
    while True:
        due = broker.due_sessions(WARNINGS)
        for lease in due.warn:
            broker.warn_session(lease.id, WARNINGS)
        for lease in due.over:
            broker.end_session(lease.id)
