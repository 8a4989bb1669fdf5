"""Slurm as the external scheduler: jobs for tickets, nodes, images, and admins' priorities."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any

from ..core.errors import (
    ConfigError,
    GPUSpawnerError,
    ImageAwaited,
    InvalidRequest,
    Refused,
    SlurmRefused,
    SlurmUnavailable,
    TooMuchAsked,
)
from ..devices.models import Device, DeviceStatus, Inventory
from ..queue.models import Ticket, Turn
from . import job_spec
from .accounts import Admission, user_of
from .cluster import Cluster
from .images import NodeImages
from .job_spec import JobResources
from .jobs import HOLDER, NO_REPORT, SlurmJob, read_jobs
from .priority import PriorityOverrides
from .programs import AWAY_PATIENCE, PATIENCE, CallBatcher, JobSpec, SingleFlight, Slurm
from .telemetry import NodesSampler

NODES_EVERY = 15.0
"""Seconds between two queries of the nodes."""

OURS = "gpuspawner: "
"""Prefix of the reason of a node that we closed.

We do not open any other node: an admin closed it, or Slurm did because its epilog failed.
"""

_GONE = frozenset({"DOWN", "NOT_RESPONDING", "FAIL"})
"""Slurm's states of nodes that get no jobs now."""
NOT_THERE = "node configuration is not available"
"""What Slurm says of a share before the machines have told it which GPUs they have."""
NO_DEVICE = "Slurm started its job without a GPU; the hub tries again"
_OFF = {
    "POWERED_DOWN": "off (power saving)",
    "POWERING_DOWN": "being switched off (power saving)",
    "POWERING_UP": "being switched on",
}
"""Slurm's states of nodes that it switches on for a job, in words for people."""


class Nodes:
    """Queries the nodes, closes them, and reopens what it closed."""

    name: str

    def __init__(self, cluster: Cluster, slurm: Slurm, log: logging.Logger | Any) -> None:
        self.cluster = cluster
        self.slurm = slurm
        self._log = log
        self._nodes: Inventory | None = None
        self._resting: Mapping[str, str] = {}
        self._drained: frozenset[str] = frozenset()
        """The nodes that are closed in Slurm, as of its last answer."""
        self._nodes_at = self._nodes_told_at = float("-inf")
        self._nodes_asker = SingleFlight(self._look_at_nodes)
        self._untold: Mapping[str, str] = {}
        """The nodes that are closed here and open in Slurm, with the reasons."""
        self._refused_at: dict[str, float] = {}
        """When Slurm refused to close a node."""

    def observe(self, now: datetime) -> Inventory:
        """Return the devices of all nodes, as of the last answer.

        Devices of a node that gets no jobs are unknown or drained.
        """

        def is_due() -> bool:
            old = time.monotonic() - self._nodes_at >= NODES_EVERY
            return old or self._nodes_at <= self._nodes_told_at

        # The caller may delay others: an older answer is good enough.
        known = self._nodes is not None
        self._nodes_asker.wait(is_due, AWAY_PATIENCE if known else PATIENCE)
        nodes = self._nodes
        if nodes is None:
            why = SlurmUnavailable(why="it has not listed its nodes yet").message
            return Inventory(devices=(), observed_at=now, source=self.name, error=why)
        return replace(nodes, observed_at=now)

    def resting(self, machine: str) -> str:
        """Return why no answer of a machine is expected; empty if one is. Blocks."""
        self.observe(datetime.now(timezone.utc))
        return self._resting.get(machine, "")

    def sampler(self, processes_every: float = 60.0) -> NodesSampler:
        """Return a sampler; each node's own one decides how often processes are listed."""
        return NodesSampler(self.cluster, self._log, self.resting)

    def machine_of(self, uuid: str) -> str:
        """Return the node of a device; empty if unknown."""
        found = self.cluster.device(uuid)
        return found[0].name if found else ""

    def on_machine(self, uuid: str) -> tuple[str, ...]:
        """Return all devices of a device's node."""
        found = self.cluster.device(uuid)
        return tuple(device.uuid for device in found[0].devices) if found else (uuid,)

    def drained(self) -> frozenset[str]:
        """Return the devices of all nodes that are closed in Slurm."""
        nodes = [node for node in self.cluster.nodes if node.name in self._drained]
        return frozenset(device.uuid for node in nodes for device in node.devices)

    def close(self, uuid: str, reason: str) -> None:
        """Close a device's node. Raises SlurmRefused or SlurmUnavailable."""
        if not (machine := self.machine_of(uuid)):
            return
        found, words = self._state_of(machine), OURS + reason
        if not found.drained or (found.is_ours and found.reason != words):
            self.slurm.close(machine, words)
            self._nodes_told_at = time.monotonic()

    def keep_closed(self, closed: Mapping[str, str]) -> list[str]:
        """Keep the nodes of these devices closed; returns the devices of those closed now."""
        wanted = {self.machine_of(uuid): (uuid, reason) for uuid, reason in closed.items()}
        wanted.pop("", None)  # of no machine of the cluster: local devices, from before
        if wanted:
            self.observe(datetime.now(timezone.utc))
        told, untold = [], {}
        for machine in sorted(wanted.keys() - self._drained):
            uuid, reason = wanted[machine]
            refused_at = self._refused_at.get(machine, float("-inf"))
            if machine in self._untold and time.monotonic() - refused_at < NODES_EVERY:
                untold[machine] = self._untold[machine]  # Slurm would log that each second
                continue
            try:
                self.close(uuid, reason)
                told.append(uuid)
            except GPUSpawnerError as error:
                if isinstance(error, SlurmRefused):
                    self._refused_at[machine] = time.monotonic()
                untold[machine] = error.message
                if self._untold.get(machine) != error.message:
                    self._log.warning(
                        "The machine %s could not be closed: %s", machine, error.message
                    )
        self._untold = untold
        return told

    def reopen(self, uuid: str) -> None:
        """Reopen a node that we closed. Raises Refused for another one, or SlurmUnavailable."""
        if not (machine := self.machine_of(uuid)):
            return
        found = self._state_of(machine)
        if not found.drained:
            return
        if not found.is_ours:
            why = (found.reason or "no reason is given") + (f" (by {found.by})" if found.by else "")
            raise InvalidRequest(
                f"The machine {machine} was drained in Slurm, not by gpuspawner: {why}. "
                f"Resolve that, then run: scontrol update NodeName={machine} State=RESUME."
            )
        self.slurm.reopen(machine)
        self._nodes_told_at = time.monotonic()

    # Helpers.

    def _look_at_nodes(self) -> None:
        began, now = time.monotonic(), datetime.now(timezone.utc)
        try:
            self._nodes = self._observed(now)
        except GPUSpawnerError as error:
            devices = self._nodes.devices if self._nodes else ()
            self._nodes = Inventory(
                devices=devices, observed_at=now, source=self.name, error=error.message
            )
        finally:
            self._nodes_at = began

    def _observed(self, now: datetime) -> Inventory:
        states = _states(self.slurm.nodes())
        self._resting = {name: state.resting for name, state in states.items()}
        self._drained = frozenset(name for name, state in states.items() if state.drained)
        devices = tuple(
            _seen(device, self.machine_of(device.uuid), states)
            for device in job_spec.devices_of(self.cluster)
        )
        return Inventory(devices=devices, observed_at=now, source=self.name)

    def _silent(self, machines: Collection[str]) -> frozenset[str]:
        """Return the nodes among these that have not reported since Slurm's controller started."""
        states = _states(self.slurm.nodes())
        return frozenset(n for n in machines if n in states and not states[n].has_reported)

    def _state_of(self, machine: str) -> _State:
        states = _states(self.slurm.nodes())
        if machine not in states:
            raise SlurmUnavailable(why=f"it does not list the machine {machine}")
        return states[machine]


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    status: DeviceStatus
    why: str = ""
    resting: str = ""
    """Why no answer of it is expected."""
    drained: bool = False
    reason: str = ""
    """Slurm's own reason, and who gave it."""
    by: str = ""
    has_reported: bool = True
    """False until it reports to a controller that was started anew."""

    @property
    def is_ours(self) -> bool:
        """True if we closed it, if it is closed."""
        return self.reason.startswith(OURS)


_UNHEARD_OF = _State(status=DeviceStatus.UNKNOWN, why="Slurm does not know it")


def _seen(device: Device, machine: str, states: Mapping[str, _State]) -> Device:
    state = states.get(machine, _UNHEARD_OF)
    reason = state.why
    if state.status is DeviceStatus.UNKNOWN:
        reason = f"the machine {machine} gets no work: {reason}"
    return replace(device, status=state.status, reason=reason)


def _states(text: str) -> dict[str, _State]:
    """Parse the state of each node, by name. Raises SlurmUnavailable."""
    try:
        found = json.loads(text)
        if errors := found.get("errors"):
            raise SlurmUnavailable(why=f"sinfo says {str(errors)[:200]}")
        return {str(node["name"]): _state(node) for node in found["nodes"]}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"sinfo --json did not answer in Slurm 22.05's format ({error!r:.80})"
        raise SlurmUnavailable(why=why) from None


def _state(node: Mapping[str, Any]) -> _State:
    flags: Iterable[str] = node.get("state_flags") or ()
    words = {str(node["state"]).upper(), *(str(flag).upper() for flag in flags)}
    reason, by = str(node.get("reason") or ""), str(node.get("reason_set_by_user") or "")
    off = next((said for word, said in _OFF.items() if word in words), "")
    drained = "DRAIN" in words
    state = _State(
        status=DeviceStatus.OK,
        why=off,
        resting=off,
        drained=drained,
        reason=reason,
        by=by,
        has_reported=bool(off or node.get("slurmd_start_time", True)),
    )
    # A node that is off does not respond, and gets jobs all the same.
    if gone := words & (_GONE - {"NOT_RESPONDING"} if off else _GONE):
        said = " and ".join(sorted(word.lower().replace("_", " ") for word in gone))
        why = f"{said} ({reason})" if reason else said
        return replace(state, status=DeviceStatus.UNKNOWN, why=why, resting="")
    if state.drained:
        who = f"drained by {by}" if by and not state.is_ours else "drained"
        said = reason.removeprefix(OURS)
        why = f"{who}: {said}" if said else who
        return replace(state, status=DeviceStatus.DRAINED, why=why)
    return state


LOG = logging.getLogger(__name__)

EVERY = 1.35
"""Seconds for which one answer of Slurm serves everybody.

Together with the accounting service's queries, that is less than one query a second.
"""

SOON, EAGER = 0.3, 3.0
"""After a submit, Slurm may be queried so many seconds after an answer, for so many seconds."""

SAVED = 2
"""How many queries may come early, after a time without queries."""

AT_ONCE = 16
"""How many tickets are submitted at once."""

OLD = timedelta(seconds=5)
"""A ticket of this age may have a job that we did not submit."""

SETTLING = 0.3
"""Seconds that Slurm gets to act before the result is queried."""

ENDING = 10.0
"""Seconds after which a cancelled job that still runs was not cancelled: Slurm refused it."""

FRESH = 2.0
"""For how many seconds a query shows which jobs a ticket has."""

SWITCHED_ON = "its machine is being switched on"
SHARED_STILL = "somebody still has a share of its GPU"

FIRST_RETRY, LAST_RETRY = 5.0, 60.0
"""Seconds until a ticket whose job got no device has another job, doubled each time."""


class SlurmDelegate(Nodes):
    """Tickets as jobs, and jobs as turns; see :class:`gpuspawner.queue.models.Delegate`."""

    engine = "slurm"
    name = "slurm"

    def __init__(
        self,
        cluster: Cluster,
        slurm: Slurm,
        *,
        as_member: bool = True,
        before: Callable[[Ticket], Admission] = lambda ticket: Admission(),
        log: logging.Logger | Any = LOG,
    ) -> None:
        """Create it.

        ``as_member``: jobs belong to the members' own users on the nodes, else to ours. ``before``
        is called with each ticket before its job is submitted.
        """
        super().__init__(cluster, slurm, log)
        self.images = NodeImages(cluster.nodes, log)
        self.resources: Callable[[Ticket], JobResources] = lambda ticket: JobResources()
        """Returns what a ticket's server needs besides devices. Set where the catalog is."""
        self._hand = PriorityOverrides(slurm, log)
        self._tended = float("-inf"), False
        """When jobs were last told something, and True if that was in a pause."""
        self._ending = CallBatcher[int, None](lambda jobs: self.slurm.cancel(*sorted(set(jobs))))
        self._as_member = as_member
        self._before = before
        self._asker = SingleFlight(lambda: self._look())
        self._jobs: dict[str, SlurmJob] = {}
        self._shared_still: Collection[tuple[str, int]] = ()
        """The devices that several jobs have, as nodes and Slurm's indices."""
        self._turns: dict[str, Turn] = {}
        self._told_to_end: dict[str, float] = {}
        """When the jobs of tickets were cancelled, by ticket, until a query has shown the end."""
        self._telling = threading.Lock()
        self._ended_by_us: set[int] = set()
        """Jobs that have ended after they were cancelled: their tickets may get others."""
        self._began = self._answered = self._paid = float("-inf")
        self._handed_in = self._nobody_waited = float("-inf")
        self._trouble: SlurmUnavailable | None = None
        self._told: float | None = None
        """When Slurm was first told something since the last query."""
        self._submitted: dict[str, float] = {}
        self._pauses: dict[str, tuple[float, float]] = {}
        """When a ticket whose job got no device may have another one, and after which pause."""
        self._awaited: frozenset[str] = frozenset()
        """The nodes that had not reported when Slurm refused a job for want of them."""
        self._submitting = [threading.Lock() for _ in range(AT_ONCE)]

    # Tickets.

    def submit(self, ticket: Ticket) -> None:
        """Submit a ticket's job. Raises TooMuchAsked, SlurmRefused or SlurmUnavailable."""
        # A request and the round may both find that it has no job.
        with self._submitting[hash(ticket.id) % len(self._submitting)]:
            self._must_answer()
            # In either direction: the wall clock may have been set since.
            is_old = abs(datetime.now(timezone.utc) - ticket.created_at) > OLD
            if ticket.id not in self._submitted and is_old:
                self.turns()  # an earlier hub may have submitted it
            job = self._jobs.get(ticket.id)
            if self.is_missing(ticket) and (job is None or not job.lives):
                self._submit(ticket)

    def _submit(self, ticket: Ticket) -> None:
        user = user_of(ticket.server.user) if self._as_member else ""
        able = job_spec.able(ticket.request, self.cluster)
        untold = frozenset(self._untold)
        if untold and able <= untold:
            raise SlurmUnavailable(why="the suitable machines are closed")
        if self._pauses_now(ticket):
            raise SlurmUnavailable(why=NO_DEVICE)
        if able & self._awaited:
            self._awaited = self._awaited - able | self._silent(able)
            if able <= self._awaited:
                raise SlurmUnavailable(why=NO_REPORT)
        lacking = {*untold, *self.images.lacking(ticket, able)}
        account, is_late = self._before(ticket)
        job = job_spec.of(
            ticket,
            self.cluster,
            user=user,
            account=account,
            lacking=lacking,
            resources=self.resources(ticket),
        )
        if job.nice < 0 and not self._as_member:
            job = replace(job, nice=0)  # sbatch takes points from root alone: the next round tries
        # Before and after: a query that begins in between proves nothing.
        self._submitted[ticket.id] = float("inf")
        try:
            self._hand_in(job)
        except SlurmRefused as error:
            if NOT_THERE in error.message and (silent := self._silent(able)):
                self._awaited |= silent
                raise SlurmUnavailable(why=NO_REPORT) from None
            if job.minutes is not None and "time limit" in error.message:
                self.must_allow(job.minutes)  # reports how long it may be
            raise _explained(error, user, is_late) from None
        finally:
            self._submitted[ticket.id] = self._handed_in = time.monotonic()
            self._has_news()
        self._hand.submitted(ticket, job.nice)
        self._log.info("Ticket %s of %s was submitted to Slurm", ticket.id, ticket.server)

    def _pauses_now(self, ticket: Ticket) -> bool:
        """Return True if a ticket is to have no job for a moment, since the last had no device."""
        until, _ = self._pauses.get(ticket.id, (0.0, 0.0))
        return time.monotonic() < until

    def _hand_in(self, job: JobSpec) -> None:
        try:
            self.slurm.submit(job)
        except SlurmRefused as error:
            if not job.account or "Invalid account" not in error.message:
                raise
            # The controller may learn of it later than its database, or it has disappeared since.
            self._log.warning("Slurm does not know %s in the account %s", job.user, job.account)
            self.slurm.submit(replace(job, account=""))

    def is_missing(self, ticket: Ticket) -> bool:
        """Return True if a ticket has no job of ours in the last query."""
        submitted = self._submitted.get(ticket.id)
        return submitted is None or submitted < self._began

    def cancel(self, ticket_id: str) -> None:
        """Cancel every job of this ticket, waiting or not. Raises SlurmUnavailable."""
        self._must_answer()
        job = self._surely(ticket_id)
        if job is None:
            name = f"{HOLDER}{ticket_id}"
            self._tell_end(ticket_id, partial(self.slurm.cancel_named, name))
        elif job.lives:
            self._tell_end(ticket_id, partial(self._ending.tell, job.id))

    def cancel_job(self, number: int) -> None:
        """Cancel a job that was alive a moment ago. Raises SlurmUnavailable."""
        jobs = self._jobs
        ticket_id = next((name for name, job in jobs.items() if job.id == number), "")
        self._tell_end(ticket_id, partial(self._ending.tell, number))

    def _tell_end(self, ticket_id: str, tell: Callable[[], object]) -> None:
        """Cancel the job of a ticket; from now on :meth:`turns` lists no devices for it.

        Raises SlurmUnavailable; then it may have been told.
        """
        with self._telling:
            self._told_to_end[ticket_id] = float("inf")
        try:
            with suppress(SlurmRefused):  # it is already over
                tell()
        finally:
            with self._telling:
                self._told_to_end[ticket_id] = time.monotonic()
            self._has_news()

    def _surely(self, ticket_id: str) -> SlurmJob | None:
        """Return the only job of a ticket, if a very recent query has shown it.

        None if there may be another one. To find it by its name, Slurm is queried for everybody's
        jobs; and an older number may belong to somebody else, once a controller has lost its state.
        """
        with suppress(SlurmUnavailable):
            self.turns(FRESH)
        began = self._began  # first: another query may come in between
        job, submitted = self._jobs.get(ticket_id), self._submitted.get(ticket_id)
        if job is None or time.monotonic() - began > 2 * FRESH:
            return None
        if submitted is None:  # by another process, which may have submitted it again
            return job if job.lives else None
        return job if submitted < began else None

    def extend(self, ticket_id: str, seconds: int) -> None:
        """Extend a job's time limit. Raises SlurmRefused or SlurmUnavailable."""
        asked_at = time.monotonic()
        self.turns()
        if ticket_id not in self._jobs:
            self._look_since(asked_at)  # the last query may be older than the job
        if (job := self._jobs.get(ticket_id)) is None or not job.lives:
            raise SlurmRefused(why="its job has ended")
        minutes = job_spec.minutes(seconds)
        self.must_allow(minutes)
        self.slurm.change(job.id, minutes=minutes)

    def decline(self, ticket_id: str) -> None:
        """End a ticket's job so that it gets other devices. Raises SlurmUnavailable."""
        job = self._jobs.get(ticket_id)
        if job is not None and job.lives:
            self._tell_end(ticket_id, partial(self._hand.give_back, job))
            if job.has_none:  # the next one may get none either
                _, before = self._pauses.get(ticket_id, (0.0, FIRST_RETRY / 2))
                pause = min(2 * before, LAST_RETRY)
                self._pauses[ticket_id] = time.monotonic() + pause, pause

    def turns(self, age: float = EVERY) -> Mapping[str, Turn]:
        """Return the state of each ticket, at most ``age`` seconds old. Raises SlurmUnavailable."""

        def is_due() -> bool:
            return time.monotonic() >= self._due(age)

        patience = PATIENCE if self._trouble is None else AWAY_PATIENCE
        if not self._asker.wait(is_due, patience):
            why = f"it has not answered for {self._asker.seconds:.0f} seconds"
            raise self._trouble or SlurmUnavailable(why=why)
        if (trouble := self._trouble) is not None:
            raise trouble
        return self._without_ending()

    def _without_ending(self) -> Mapping[str, Turn]:
        """Return the turns of the last query, without devices of cancelled jobs."""
        with self._telling:  # first: what is removed here was shown to have ended before that
            ending = set(self._told_to_end)
        turns = self._turns
        hidden = [n for n in ending if n in turns and (turns[n].uuids or turns[n].got_none)]
        if not hidden:
            return turns
        ended = {n: replace(turns[n], uuids=(), since=None, got_none=False) for n in hidden}
        return {**turns, **ended}

    def _look_since(self, moment: float) -> None:
        """Wait for a query that began after this moment. Raises SlurmUnavailable."""
        while self._began < moment:
            time.sleep(max(0.0, self._due(0) - time.monotonic()))
            self.turns(0)

    def _must_answer(self) -> None:
        """Raise SlurmUnavailable if Slurm did not respond last, so that nobody waits long."""
        if self._trouble is not None or self._asker.seconds > PATIENCE:
            self.turns()

    def soon(self) -> float:
        """Return the seconds until a query may show something new."""
        now = time.monotonic()
        if self._settled() < now - EVERY and not self._is_eager():
            return EVERY  # nothing was changed, or nobody wants to know
        return max(0.0, self._due(EVERY) - now)

    def _due(self, age: float) -> float:
        """Return when Slurm is queried next for an answer of at most this age."""
        due = self._answered + max(age, EVERY)
        if age <= EVERY and self._is_eager():
            due = min(due, max(self._answered + SOON, self._paid - SAVED * EVERY))
        never = self._answered == float("-inf")  # then no answer is better than none
        return due if never else max(due, self._settled())

    def _is_eager(self) -> bool:
        """Return True if a job was submitted a moment ago, and Slurm answers."""
        handed_in = self._handed_in
        recent = time.monotonic() < handed_in + EAGER
        return recent and self._trouble is None and self._nobody_waited <= handed_in

    def _has_news(self) -> None:
        if self._told is None:
            self._told = time.monotonic()

    def _settled(self) -> float:
        """Return when a query shows the effect of what Slurm was told."""
        told = self._told
        return float("-inf") if told is None else told + SETTLING

    def living(self) -> list[SlurmJob]:
        """Return the jobs of waiting tickets and running servers. Raises SlurmUnavailable."""
        self.turns()
        return [job for job in self._jobs.values() if job.lives]

    def known(self) -> list[SlurmJob]:
        """Return the tickets' jobs in the last query, including ended ones."""
        return list(self._jobs.values())

    def job(self, ticket_id: str) -> SlurmJob | None:
        """Return a ticket's job, with its devices, as of the last query that had it."""
        return self._jobs.get(ticket_id)

    # Waiting jobs.

    def why_not_yet(self, ticket: Ticket) -> str:
        """Return why a ticket cannot be submitted at the moment, or ""."""
        with suppress(GPUSpawnerError):  # the next try reports what no node has
            able = job_spec.able(ticket.request, self.cluster)
            if self._pauses_now(ticket):
                return NO_DEVICE
            if able <= self._awaited:
                return NO_REPORT
            return self.images.why_not_yet(ticket, able)
        return ""

    def tend(self, waiting: Collection[Ticket], *, paused: bool) -> None:
        """Adjust waiting jobs to the admins' decisions. Raises SlurmUnavailable."""
        tended_at, was_paused = self._tended
        if self._began <= tended_at and paused == was_paused:
            return  # the effect of the last change is not known yet
        jobs = self._jobs
        # Jobs without a ticket that waits here may be another hub's.
        found = [(t, jobs[t.id]) for t in waiting if t.id in jobs and jobs[t.id].waits]
        if paused:
            self._hand.pause(job for _, job in found)
        else:
            places = {job.id: t.position for t, job in found if t.position is not None}
            self._hand.go_on([job for _, job in found], places)
            self._hand.order(found)
            self._revive([(ticket, job) for ticket, job in found if job.is_given_up])
            for ticket, job in found:
                if job.excluded and self.images.wanted(ticket) is not None:
                    self._let_in(ticket, job)
        self._tended = time.monotonic(), paused

    def _revive(self, given_up: Collection[tuple[Ticket, SlurmJob]]) -> None:
        """Let Slurm try jobs again that it gave up before their machines had reported."""
        if not given_up:
            return
        silent = self._silent([node.name for node in self.cluster.nodes])
        for ticket, job in given_up:
            with suppress(TooMuchAsked):
                waits = silent & job_spec.able(ticket.request, self.cluster)
                if not waits and not self._hand.revive(ticket, job):
                    self.decline(ticket.id)

    def _let_in(self, ticket: Ticket, job: SlurmJob) -> None:
        """Let a waiting job also run where its image has arrived meanwhile."""
        with suppress(ImageAwaited, Refused):
            able = job_spec.able(ticket.request, self.cluster)
            lacking = {*self.images.lacking(ticket, able), *self._untold}
            nodes = job_spec.excluded(ticket.request, self.cluster, lacking)
            if set(nodes) < set(job.excluded.split(",")):
                self._hand.exclude(job, nodes)

    def must_allow(self, minutes: int) -> None:
        """Raise SlurmRefused for a job longer than the partition allows: for root Slurm allows it.

        Also raises SlurmUnavailable.
        """
        partition = self.cluster.partition
        most = self.slurm.longest(partition)
        if minutes > most:
            hours = f"{most / 60:.1f}".removesuffix(".0")
            raise SlurmRefused(why=f"the partition {partition} allows no job longer than {hours} h")

    # Queries.

    def _look(self) -> None:
        began = time.monotonic()
        self._told = None
        self._paid = max(began, self._paid) + EVERY
        try:
            self._read(read_jobs(self.slurm), began)
        except SlurmUnavailable as error:
            self._trouble = error
        except SlurmRefused as error:
            self._trouble = SlurmUnavailable(why=error.message)
        except Exception as error:  # a malformed answer
            self._log.exception("Slurm's answer could not be read")
            self._trouble = SlurmUnavailable(why=f"its answer could not be read ({error!r:.80})")
        else:
            self._trouble = None
        finally:
            self._answered = time.monotonic()  # also a missing answer costs Slurm time

    def _read(self, jobs: list[SlurmJob], began: float) -> None:
        line = sorted((job for job in jobs if job.waits), key=lambda job: (-job.priority, job.id))
        places = {job.id: place for place, job in enumerate(line, start=1)}
        found: dict[str, SlurmJob] = {}
        for job in jobs:
            if job.ticket_id:
                found[job.ticket_id] = self._better(found.get(job.ticket_id), job)
        before = self._jobs
        self._jobs = {name: _with_devices(job, before.get(name)) for name, job in found.items()}
        self._note_ends({job.id for job in jobs})
        users = Counter((job.node, index) for job in jobs if job.lives for index in job.indices)
        self._shared_still = {device for device, count in users.items() if count > 1}
        self._turns = {
            name: self._turn(job, places.get(job.id, 0), len(line))
            for name, job in self._jobs.items()
        }
        self._began = began
        self._forget_ends(began)
        for name in self._pauses.keys() - self._jobs.keys():
            del self._pauses[name]
        if not any(job.waits for job in self._jobs.values()):
            self._nobody_waited = began
        for name in self._submitted.keys() - self._jobs.keys():
            if self._submitted[name] < began:
                del self._submitted[name]

    def _note_ends(self, known: Collection[int]) -> None:
        """Remember which jobs have ended after they were cancelled, while Slurm knows them."""
        with self._telling:
            told = [job for name in self._told_to_end if (job := self._jobs.get(name))]
        self._ended_by_us |= {job.id for job in told if not job.lives}
        self._ended_by_us.intersection_update(known)

    def _forget_ends(self, began: float) -> None:
        """Forget cancelled jobs that ended before this query, or were not cancelled after all."""
        with self._telling:
            for name, told_at in list(self._told_to_end.items()):
                job = self._jobs.get(name)
                pause = ENDING if job is not None and job.lives else 0.0
                if told_at + pause < began:
                    del self._told_to_end[name]

    def _better(self, one: SlurmJob | None, other: SlurmJob) -> SlurmJob:
        """Return which of two jobs of one ticket counts.

        The first, or one that was submitted after its end. Any other living job is one too many: an
        interrupted submit came through after all, or somebody used the name for their own job.
        """
        if one is None:
            return other
        first, second = sorted((one, other), key=lambda job: job.id)
        ended, submitted = first.ended_at, second.submitted_at
        if not first.lives and (ended is None or submitted is None or ended <= submitted):
            return second
        if second.lives:
            self._log.warning("Two jobs for one ticket: cancelling %s", second.id)
            with suppress(GPUSpawnerError):
                self.slurm.cancel(second.id)
        return first

    def _turn(self, job: SlurmJob, place: int, of: int) -> Turn:
        turn = partial(Turn, ticket_id=job.ticket_id)
        if job.waits:
            score = float(job.priority)
            return turn(place=place, of=of, score=score, why=job.why, start=job.started_at)
        if not job.lives:
            again = job.may_come_again or job.id in self._ended_by_us
            return turn(over=job.end, again=again, ended_at=job.ended_at)
        why = SWITCHED_ON if job.state == "CONFIGURING" else ""
        if not job.is_share and any((job.node, n) in self._shared_still for n in job.indices):
            # Slurm 22.05 gives a whole device as soon as the first of its shares has ended.
            return turn(since=job.started_at, why=SHARED_STILL)
        got_none = job.has_none and not job.indices
        return turn(uuids=self._uuids(job), since=job.started_at, got_none=got_none, why=why)

    def _uuids(self, job: SlurmJob) -> tuple[str, ...]:
        """Return the devices of a running job; none while it is being cleaned up."""
        if job.state != "RUNNING" or not job.indices:
            return ()
        try:
            node = self.cluster.node(job.node)
            return tuple(node.device_at(index).uuid for index in job.indices)
        except ConfigError as error:
            self._log.error("%s", error.message)
            return ()


def _with_devices(job: SlurmJob, before: SlurmJob | None) -> SlurmJob:
    """Return the job with the devices that it had while it ran, which Slurm then forgets."""
    if job.indices or before is None or before.id != job.id:
        return job
    return replace(job, indices=before.indices)


def _explained(error: SlurmRefused, user: str, is_late: bool) -> SlurmRefused:
    said = str(error.fields.get("why", ""))
    if "Invalid user" in said or "Invalid account" in said:
        if is_late:
            return SlurmRefused(
                f"Slurm has not registered {user} yet, because its database is slow just now. Try "
                "again in a minute."
            )
        who = f"the user {user} has no account there" if user else "the hub has no account there"
        return SlurmRefused(why=f"{who}. Ask your admin to create it with gpuspawner slurm sync")
    return error
