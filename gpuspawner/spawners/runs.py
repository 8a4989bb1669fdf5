"""Starts of runs: a spawner of the member starts a program instead of a server."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from jupyterhub import orm
from jupyterhub.objects import Server
from jupyterhub.user import User
from jupyterhub.utils import maybe_future

from ..core.errors import (
    GPUSpawnerError,
    InvalidRequest,
    MemberGone,
    NoDeviceFree,
    NoRuns,
    RunStartFailed,
    StartFailed,
    TicketEnded,
    Unavailable,
)
from ..core.units import DeviceCount
from ..leases.models import LeaseState, Request, Terms
from ..runs.models import FollowedRun, Run, RunState, Work
from ..runs.rules import slug_of
from ..runs.sweeps import SweepPrice, SweepRequest
from ..services import Services, hub_services
from .mixin import GPUSpawnerMixin
from .options import devices_in
from .progress import FailedSpawn
from .quotes import QuoteQuestion, RunQuote, quote_of
from .recovery import Recovery, recovery_of

KEY = "gpuspawner_runs"

OF_ONE_START = ("wait", "shown_at")
"""Options that a run does not take from a session."""

TRY_AGAIN = 10.0
"""Seconds between two tries to start one preemptible run."""


@dataclass(slots=True)
class _Start:
    """A run that waits for its devices or whose container is on its way."""

    run: Run
    user: User
    task: asyncio.Task[None]
    is_ending: bool = False
    """True if it was cancelled or has failed. A cancel would interrupt its release."""


class RunLauncher:
    """All runs that this hub is about to start. Each waits for its devices in its own task."""

    def __init__(self, settings: MutableMapping[str, Any], services: Services) -> None:
        self.settings = settings
        self.services = services
        self.log: logging.Logger = settings["log"]
        self._starting: dict[str, _Start] = {}
        self._round = asyncio.Lock()
        self._tried: dict[str, float] = {}
        """When each preemptible run may be tried again, by the monotonic clock."""

    @classmethod
    def of(cls, settings: MutableMapping[str, Any]) -> RunLauncher:
        """Return the hub's only instance, from the settings of a handler."""
        shared: MutableMapping[str, Any] = settings["users"].settings
        if KEY not in shared:
            services = hub_services(shared, shared["config"], shared["log"])
            shared[KEY] = cls(shared, services)
        found: RunLauncher = shared[KEY]
        return found

    @property
    def recovery(self) -> Recovery:
        """The comparison that precedes the first grant of this hub."""
        return recovery_of(self.settings, self.services, self.log)

    @property
    def starting(self) -> list[Run]:
        """The runs that wait for their devices or whose container is on its way."""
        return [start.run for start in self._starting.values()]

    async def submit(
        self, user: User, work: Work, options: Mapping[str, Any], *, title: str, **fields: Any
    ) -> Run:
        """Check a run like the start of a server, and save it.

        Raises Refused with a sentence for the member; then nothing was saved.
        """
        known = await self.services.run(self.services.runs.of_key, user.name, fields["key"])
        if known is not None:
            return known
        run = Run(
            id=f"{slug_of(title)}-{secrets.token_hex(4)}",
            user=user.name,
            title=title,
            work=work,
            options=dict(options),
            created_at=self.services.clock(),
            **fields,
        )
        _, terms = await self._require_possible(user, run)
        run = replace(run, options=dict(terms.options))
        run, is_new = await self.services.run(self.services.runs.submit, run)
        if is_new and not run.preemptible:
            self._follow(run)
        return run

    async def submit_sweep(self, user: User, asked: SweepRequest) -> str:
        """Check a sweep once like the start of a server, and save its runs, all or none.

        Returns its id. Raises Refused with a sentence for the member; then nothing was saved.
        """
        runs = asked.runs(user.name, secrets.token_hex(4), self.services.clock())
        known = await self.services.run(self.services.runs.of_key, user.name, asked.key)
        if known is None:
            _, terms = await self._require_possible(user, runs[0])
            runs = [replace(run, options=dict(terms.options)) for run in runs]
            saved, _ = await self.services.run(self.services.runs.submit_all, runs)
            known = saved[0]
        if known.sweep is None:
            raise InvalidRequest(
                f"The key {asked.key!r} belongs to the run {known.id}, which is not a sweep.",
                field="key",
            )
        await self.start_all()
        return known.sweep

    async def quote_sweep(self, user: User, asked: SweepRequest) -> SweepPrice:
        """Return the most that a sweep can cost. Raises Refused if it cannot be submitted."""
        run, *more = asked.runs(user.name, "quote", self.services.clock())
        await self.services.run(self.services.runs.require_room, user.name, 1 + len(more))
        request, terms = await self._require_possible(user, run)
        rate, hold = await self.services.run(self.services.queue.dearest, request, terms)
        return asked.price(terms.seconds, rate, hold)

    async def quote(
        self,
        user: User,
        options: Mapping[str, Any],
        server: str | None,
        *,
        preemptible: bool,
        must_fit: bool = False,
    ) -> RunQuote:
        """Return what a run with these options would cost, and when it would start.

        Missing options are those of the member's ``server``, if any. Raises Refused if no run can
        be submitted with them; with ``must_fit`` also if no devices of this hub fit. Other reasons,
        such as credits that are missing now, are in the quote.
        """
        if server is not None and server in user.spawners:
            started = user.spawners[server].user_options or {}
            own = {name: value for name, value in started.items() if name not in OF_ONE_START}
            options = {**own, **options}
        now = self.services.clock()
        run = Run(
            id="quote",
            user=user.name,
            title="",
            work=Work(),
            options=options,
            preemptible=preemptible,
            created_at=now,
        )
        spawner = await self._ready_spawner(user, run)
        environment, request = spawner.resolve_options()
        if must_fit:
            await self.services.read(self.services.positions.require_fit, request)
        question = QuoteQuestion(
            server=run.server,
            environment=environment,
            request=request,
            terms=spawner.terms(environment, request),
            engine=spawner.engine_for(request),
            hours=spawner.session_hours(environment),
            most_gpus=spawner.most_gpus(),
        )
        return await self.services.read(quote_of, self.services, question)

    async def start_all(self) -> None:
        """Start a task for each waiting run that has none, such as after a restart of the hub."""
        async with self._round:
            await self.services.run(self.services.runs.admit)
            # A start may begin and end during the query, whose answer is then out of date.
            busy = set(self._starting)
            followed = await self.services.run(self.services.runs.open_runs)
            busy |= self._starting.keys()
            self._cancel_starts(followed)
            to_start = [x.run for x in followed if self._can_start(x) and x.run.id not in busy]
            for run in to_start:
                if not run.preemptible:
                    self._follow(run)
            if waiting := [run for run in to_start if run.preemptible]:
                await self._fill(waiting, followed)

    def _can_start(self, followed: FollowedRun) -> bool:
        """Return True if a run needs a task that starts it.

        After the comparison, a lease without a start belongs to a start that failed, such as when
        its engine crashed. It must not be reported as on its way: a comparison settles it.
        """
        if not followed.is_to_be_started or followed.run.user not in self.settings["users"]:
            return False  # a member may have a new name that their runs do not have yet
        return followed.state is RunState.WAITING or not self.recovery.is_compared

    def _cancel_starts(self, followed: Sequence[FollowedRun]) -> None:
        """Cancel the starts of runs that have to yield their devices, or whose end was ordered.

        Their program has not begun, so there is nothing to warn it for, and a pull may take hours.
        A run whose member was renamed keeps its ticket, and starts when it has the new name.
        """
        for each in followed:
            lease, start = each.lease, self._starting.get(each.run.id)
            if start is None or start.is_ending:
                continue
            is_granted = lease is not None and lease.state is LeaseState.GRANTED
            has_to_end = is_granted and lease is not None and (lease.yields_at or lease.outcome)
            if has_to_end or start.user.name != start.run.user:
                self.log.info("Run %s of %s gives up its start", each.run.id, each.run.user)
                start.is_ending = True
                start.task.cancel()

    async def _require_possible(self, user: User, run: Run) -> tuple[Request, Terms]:
        """Raise Refused with a sentence for the member if a run cannot be started as asked."""
        spawner = await self._ready_spawner(user, run)
        environment, request = spawner.resolve_options()
        terms = spawner.terms(environment, request)
        engine = spawner.engine_for(request)
        possible = self.services.queue.require_possible
        await self.services.run(possible, run.server, request, engine=engine, terms=terms)
        return request, terms

    async def _fill(self, waiting: Sequence[Run], followed: Sequence[FollowedRun]) -> None:
        """Try to start preemptible runs on devices that nobody else can use now.

        Members whose preemptible runs hold the fewest devices come first.
        """
        spare = await self.services.run(self.services.queue.count_spare)
        held = defaultdict[str, DeviceCount](int)
        for each in followed:
            if each.run.preemptible and each.lease and each.lease.state is not LeaseState.ENDED:
                held[each.run.user] += each.lease.device_count
        now = time.monotonic()
        rest = [run for run in waiting if self._tried.get(run.id, now) <= now]
        while rest and spare > 0:
            run = min(rest, key=lambda run: (held[run.user], run.created_at, run.id))
            rest.remove(run)
            self._tried[run.id] = now + TRY_AGAIN
            asked = devices_in(run.options.get("gpus"))
            held[run.user] += asked
            spare -= asked
            self._follow(run)
        self._tried = {key: at for key, at in self._tried.items() if at > now}

    def _follow(self, run: Run) -> None:
        users = self.settings["users"]
        if run.id in self._starting or run.user not in users:
            return
        task = asyncio.ensure_future(self._start(run, users[run.user]))
        self._starting[run.id] = _Start(run, users[run.user], task)
        task.add_done_callback(lambda done: self._starting.pop(run.id, None))

    async def _start(self, run: Run, user: User) -> None:
        """Wait for the run's devices and start it; if that fails, save why."""
        try:
            spawner = self._spawner(user, run)
            await spawner.apply_group_overrides()
            await spawner.await_comparison()
            followed = await self.services.run(self.services.runs.get, run.id)
            if followed.state is not RunState.WAITING or followed.has_to_settle:
                return  # its program was begun by an earlier process of the hub, or it has ended
            try:
                await maybe_future(spawner.run_pre_spawn_hook())
            except BaseException:
                if spawner.lease is not None:  # the admin's own hook failed, or was cancelled
                    await self._release(run, spawner)
                raise
            try:
                await self._require_open(run)
                await asyncio.wait_for(spawner.start(), spawner.start_timeout)
            except BaseException:
                await self._release(run, spawner)
                raise
        except FailedSpawn as error:
            await self._refuse(run, error.error)
        except GPUSpawnerError as error:
            await self._refuse(run, error)
        except Exception:
            self.log.exception("Run %s of %s did not start", run.id, run.user)
            cause = "an unexpected error occurred (tell your admin)"
            await self._refuse(run, RunStartFailed(cause=cause))

    async def _release(self, run: Run, spawner: GPUSpawnerMixin) -> None:
        """Release the devices of a start that failed or was cancelled."""
        self._starting[run.id].is_ending = True
        await spawner.run_post_stop_hook()

    async def _refuse(self, run: Run, error: GPUSpawnerError) -> None:
        if isinstance(error, NoDeviceFree) and run.preemptible:
            return  # somebody else was faster, or what is free does not fit
        if isinstance(error, (Unavailable, TicketEnded)):
            # The next round tries again, or settles what the end of its ticket means.
            self.log.warning("Run %s of %s waits: %s", run.id, run.user, error.message)
            return
        if isinstance(error, StartFailed):
            error = RunStartFailed(**error.fields)
        with suppress(GPUSpawnerError):  # the next round refuses it again
            await self.services.run(self.services.runs.refuse, run.id, error.message)

    async def _require_open(self, run: Run) -> None:
        """Raise MemberGone if the run was stopped while it got its devices."""
        followed = await self.services.run(self.services.runs.get, run.id)
        if followed.run.outcome:
            raise MemberGone(why="the run was stopped")

    async def _ready_spawner(self, user: User, run: Run) -> GPUSpawnerMixin:
        spawner = self._spawner(user, run)
        await spawner.refresh_catalog()
        await spawner.apply_group_overrides()
        return spawner

    def _spawner(self, user: User, run: Run) -> GPUSpawnerMixin:
        """Return a spawner that the Hub does not know, for one start of a run."""
        spawner_class = self.settings["spawner_class"]
        if not getattr(spawner_class, "runs_programs", False):
            raise NoRuns()
        name = run.server.name
        spawner: GPUSpawnerMixin = spawner_class(
            user=user,
            orm_spawner=orm.Spawner(name=name),
            hub=self.settings["hub"],
            authenticator=user.authenticator,
            config=self.settings["config"],
            user_options=dict(run.options),
        )
        # For its own servers, the Hub reads these from its database.
        nowhere = orm.Server(
            proto="http", ip="", port=0, base_url=f"{user.base_url}{name}/", cookie_name=""
        )
        spawner.server = Server(orm_server=nowhere)
        spawner.become_run(run)
        return spawner
