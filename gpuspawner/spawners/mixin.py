"""What every engine's spawner shares: acquire, progress, environment, state and release.

The order of one life (rules 2 to 5 of the design):

1. ``run_pre_spawn_hook``: check the options, wait for the comparison after a hub start,
   acquire the lease (on disk before anything exists), then the admin's own hook;
2. ``start``: the engine starts the server, and when it answers the lease is confirmed;
3. ``run_post_stop_hook``, which JupyterHub always calls: once the engine proves the
   server gone the lease is released and settled, then the admin's own hook. What cannot
   be proved now stays leased, and the accounting service finishes it.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Coroutine, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlparse

import sqlalchemy as sa
from jupyterhub.utils import AnyTimeoutError, exponential_backoff, make_ssl_context, maybe_future
from traitlets import Any as AnyTrait
from traitlets import default

from ..catalog.models import Environment
from ..core.errors import GPUSpawnerError, MemberGone, ServerHasLease, StartFailed, TicketEnded
from ..core.units import format_credits
from ..engines.base import Engine
from ..leases.models import Lease, LeaseState, Request, ServerRef
from ..ledger.rules import check_payer
from ..queue.models import Ticket
from ..queue.service import Terms
from ..services import Broker, hub_broker
from . import no_shows
from .base import spawn_exception
from .form import GPUSpawnerForm
from .progress import SpawnProgress
from .readiness import answers
from .recovery import end_waits_first, is_recovered, recovered
from .turns import Queueing, what_you_got


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """What an engine proved. Not being able to say is EngineUnavailable, not a Proof."""

    gone: bool
    ended_at: datetime | None = None
    """When it ended, if the engine knows."""
    detail: str = ""
    """How it ended, in words."""
    forgotten: bool = False
    """Who knew of it has forgotten it, which alone proves nothing."""


class Acquiring(GPUSpawnerForm):
    """The part of the mixin that asks the broker. Use :class:`GPUSpawnerMixin`, not this."""

    broker = AnyTrait(help="The broker; shared by all spawners of a hub through its settings.")

    @default("broker")
    def _default_broker(self) -> Broker:
        return hub_broker(self.hub_settings, self.config, self.log)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lease: Lease | None = None
        self.lease_id = ""
        self.touched = True
        """Whether the engine was asked to create anything since the last acquire."""
        self.said = SpawnProgress()
        self._acquiring: asyncio.Future[Lease | Ticket] | None = None
        self._asked: asyncio.Future[Lease | Ticket] | None = None
        """The same as long as nobody has come for the answer."""
        self._left_ticket = ""
        """The ticket of a wait that was cancelled; whoever stops the server ends it."""

    if TYPE_CHECKING:  # what the mixin has, which builds on this

        async def _release(self, reason: str) -> bool:
            """Release the lease once the server is proved gone. Whether it was."""

    def engine_for(self, request: Request) -> str:
        """The name of the engine that a server of this request is to run on."""
        return self.engine_name

    # Shared by all spawners of this hub.

    @property
    def hub_settings(self) -> MutableMapping[str, Any]:
        settings: MutableMapping[str, Any] = self.user.settings
        return settings

    def shared(self, key: str, make: Any) -> Any:
        """One object a hub, made by whoever needs it first."""
        if key not in self.hub_settings:
            self.hub_settings[key] = make()
        return self.hub_settings[key]

    @property
    def queueing(self) -> Queueing:
        """Where the spawns of this hub wait."""
        found: Queueing = self.shared(
            "gpuspawner_queueing", lambda: Queueing(self.broker, self.log)
        )
        return found

    @property
    def server_ref(self) -> ServerRef:
        """This server, as the store names it."""
        return ServerRef(self.user.name, self.name or "")

    async def _acquire(self, request: Request, terms: Terms) -> Lease:
        try:
            return await self._grant(request, terms)
        except ServerHasLease:
            await self._settle_previous()
        return await self._grant(request, terms)

    def _ask(self, request: Request, terms: Terms) -> asyncio.Future[Lease | Ticket]:
        """Begin to ask the broker; :meth:`_grant` takes the answer."""
        self._left_ticket = ""
        self._asked = self._acquiring = self.queueing.ask(
            self.server_ref, request, engine=self.engine_for(request), terms=terms, said=self.said
        )
        return self._asked

    async def _grant(self, request: Request, terms: Terms) -> Lease:
        """The lease, at once or when the turn has come."""
        asked = self._asked or self._ask(request, terms)
        self._asked = None
        # The transaction ends even if this spawn is cancelled: what it granted is then
        # released by whoever comes first, the hook after the stop or this callback.
        try:
            got = await asyncio.shield(asked)
        except asyncio.CancelledError:
            asked.add_done_callback(self._give_back)
            raise
        lease = await self._wait_in_line(got) if isinstance(got, Ticket) else got
        self.touched = False
        return lease

    def _give_back(self, acquired: asyncio.Future[Lease | Ticket]) -> None:
        if acquired.cancelled() or acquired.exception():
            return
        got = acquired.result()
        if isinstance(got, Ticket):
            self._left_ticket = got.id
            return
        give_back = partial(self.broker.release, got.id, reason="the start was cancelled")
        self.broker.store.executor.submit(give_back)

    async def _wait_in_line(self, ticket: Ticket) -> Lease:
        """Wait for the turn, with place and estimate on the pending page."""
        chosen: Environment | None = None

        def still_allowed() -> Terms:
            nonlocal chosen
            self._must_be_there(ticket.server)
            chosen, request = self.resolve_options()
            # What the environment needs of the driver may be edited meanwhile: nobody asked for it.
            asked = ticket.request
            if request != replace(asked, min_driver=request.min_driver, min_cuda=request.min_cuda):
                raise TicketEnded(why="what you asked for is not what you may have any more")
            terms = self.terms(chosen, request)
            check_payer(ticket.account, ticket.server.user, terms.groups)
            return terms

        end_waits_first(self.authenticator, self.queueing)
        try:
            lease = await self.queueing.wait(ticket, still_allowed, self.said)
        except asyncio.CancelledError:
            # By the member's stop, which ends the ticket, or by a hub that shuts down, which
            # does not: the next one goes on with it.
            self._left_ticket = ticket.id
            raise
        if chosen is not None:
            self.apply_environment(chosen)  # the catalog may have changed since they asked
        return lease

    def _must_be_there(self, server: ServerRef) -> None:
        """Raises MemberGone when the server's member was renamed or removed at the Hub."""
        if self.server_ref != server:
            raise MemberGone(why="the member was renamed")
        if not sa.inspect(self.orm_spawner).persistent:
            raise MemberGone(why="the member was removed")

    async def _leave_line(self) -> None:
        """The member stopped a start that waited in line: the place is given up."""
        if self._acquiring is not None and not self._acquiring.done():
            await asyncio.wait([self._acquiring])
        if self._asked is not None:  # stopped before it came for the answer
            self._give_back(self._asked)
            self._asked = None
        ticket, self._left_ticket = self._left_ticket, ""
        if ticket:
            await self.queueing.end(ticket, "cancelled", "the start was stopped", tell=False)

    async def _settle_previous(self) -> None:
        """End what an earlier start of this very server left behind."""
        self.lease = await self.broker.run(self.broker.lease_of, self.server_ref)
        if self.lease is None:
            return
        self.log.warning("%s still has lease %s: settling it", self.server_ref, self.lease.id)
        await self._release("left over from an earlier start")
        if self.lease is not None:
            raise ServerHasLease()


ASK_AGAIN = 0.05
"""Seconds after which a server that did not answer is asked again; later, more seldom."""

ASK_SELDOM = 0.2
"""Seconds between two such questions at most: half of it, on average, is a member's wait."""

LOOK_AFTER = 0.25
"""Seconds after which the engine is asked again whether a server that does not answer lives."""

CLEARING = 60.0
"""Seconds for which the Hub waits for what a failed start left to be cleared away."""


class GPUSpawnerMixin(Acquiring):
    """Put before a Spawner class: its servers then hold leases.

    An engine adds :meth:`engine`, :meth:`prove_gone` and how a lease reaches a server.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen_alive_at: datetime | None = None
        self.stopped_at: datetime | None = None
        self.finished_at: datetime | None = None
        """When the server ended, by the engine's wall clock, if it said so."""
        self._spawn: asyncio.Task[Any] | None = None
        """The Hub's, which also clears away what a start leaves that fails."""
        self._is_starting = False
        """Whether that task is still on its way to a server that answers."""
        self._claim: asyncio.Task[None] | None = None
        self._adopting: asyncio.Task[None] | None = None
        self._looked_up = False

    # What an engine says. A Spawner's metaclass is not that of abstract classes: whoever forgets
    # one of the first two reads so at the first question.

    def engine(self) -> Engine:
        """The engine as the reconciler sees it."""
        raise NotImplementedError(_no_engine(self, "engine"))

    async def prove_gone(self) -> ExitStatus:
        """Whether the server is proved gone. Raises EngineUnavailable when nobody can say."""
        raise NotImplementedError(_no_engine(self, "prove_gone"))

    async def failure_detail(self) -> str:
        """Why a server that started is not there any more, in words; for log and member."""
        return ""

    def looks_first(self, request: Request) -> bool:
        """Whether a start has to look at the member's files or image before it asks for a lease."""
        return False

    async def look_at_files(self, request: Request) -> None:
        """Refuse a start that the member's files leave no room for, or whose image is none."""

    async def open_workspace(self) -> None:
        """Make the member's workspace ahead of their first start, where that can be done."""

    # 1. Acquire.

    def run_pre_spawn_hook(self) -> Any:
        """Acquire, then the admin's own ``pre_spawn_hook``."""
        if self.catalog_is_due():
            return self._refresh_then_hook()
        self.said = SpawnProgress()
        self.stopped_at = self.finished_at = None
        self._spawn = asyncio.current_task()
        self._is_starting = True
        try:
            environment, request = self.resolve_options()
            terms = self.terms(environment, request)
            self.apply_environment(environment)
        except GPUSpawnerError as error:
            self._is_starting = False
            raise spawn_exception(error) from error
        if is_recovered(self) and not self.looks_first(request):
            # Not only when the event loop comes back to this spawn: where very many are asked
            # for at once, it first takes up all the others.
            self._ask(request, terms)
        return self._acquire_then_hook(request, terms)

    async def _refresh_then_hook(self) -> None:
        await self.refresh_catalog()
        await self.run_pre_spawn_hook()

    async def _acquire_then_hook(self, request: Request, terms: Terms) -> None:
        try:
            await recovered(self)
            if self.looks_first(request):
                await self.look_at_files(request)
            self.lease = await self._acquire(request, terms)
            self.lease_id = self.lease.id
            self.said.say(what_you_got(self.lease), 10)
            if (hook := super().run_pre_spawn_hook()) is not None:
                await maybe_future(hook)
        except GPUSpawnerError as error:
            self._is_starting = False
            raise spawn_exception(error) from error
        except BaseException:
            self._is_starting = False
            raise

    async def end_leftover(self) -> None:
        """End a server that the Hub believes stopped. The engine overrides it."""

    # 2. Start.

    async def start(self) -> Any:
        """Start the server, wait until it answers, and confirm the lease.

        As with other spawners ``start_timeout`` limits the engine's part, and ``http_timeout`` the
        wait that follows. We wait here and not only in the Hub, so that a server that dies early
        fails at once, with its reason.
        """
        if self.lease is None:
            raise spawn_exception(StartFailed(cause="it holds no lease"))
        began = time.monotonic()
        try:
            url = await super().start()
            self.said.say("Waiting for the server to answer", 80)
            await self._outlast_start_timeout(self._confirm_ready(url), began)
        except GPUSpawnerError as error:
            raise spawn_exception(error) from error
        except asyncio.CancelledError:
            if not self._is_start_timeout(began):
                raise
            raise spawn_exception(await self._too_slow()) from None
        finally:
            self._is_starting = False
        self.seen_alive_at = self.broker.clock()
        self.said.say("The server answers", 95)
        self.watch_claim()
        return url

    def _is_start_timeout(self, began: float) -> bool:
        """Return True if a cancellation now is the Hub's, of a start that takes too long.

        It also cancels one that its member stops.
        """
        return time.monotonic() - began >= self.start_timeout - 1

    async def _outlast_start_timeout(self, steps: Coroutine[Any, Any, None], began: float) -> None:
        """Run the steps to their end, also after ``start_timeout``.

        The Hub then cancels the start once and, as ``asyncio.wait_for`` does, takes what still
        comes of it. Any other cancellation, and the end of the Hub's own task, ends the steps.
        """
        task = asyncio.ensure_future(steps)
        try:
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError:
                if not self._is_start_timeout(began):
                    raise
                spawn = {self._spawn} if self._spawn is not None else set()
                await asyncio.wait({task, *spawn}, return_when=asyncio.FIRST_COMPLETED)
                if not task.done():
                    raise  # Python before 3.12 does not pass on that the member stopped it
                task.result()
        finally:
            task.cancel()

    async def _confirm_ready(self, url: Any) -> None:
        """Wait until the server answers at ``url``, and confirm its lease."""
        asked = asyncio.ensure_future(self.engine_started_at())
        try:
            await self._wait_ready(url)
            started_at = await asked
        finally:
            asked.cancel()
        lease = cast("Lease", self.lease)
        self.lease = await self.broker.run(
            self.broker.confirm,
            lease.id,
            self.engine_ref(),
            started_at=started_at,
            devices=lease.devices,
        )
        if self.lease.state is LeaseState.ENDED:
            raise StartFailed(cause="its lease was ended before it answered")

    async def cleared(self) -> None:
        """Wait while a start that failed is being cleared away: for the ``poll`` of an engine.

        When that takes longer than ``slow_spawn_timeout``, the Hub asks whether the server lives,
        and a second later says "failed to start" in place of what failed. A start that goes on is
        not waited for: a Hub that shuts down stops it from outside, and may not wait for a pull.
        """
        spawn = self._spawn  # which polls as well, when it has failed
        is_clearing = self.pending == "stop" and not self._is_starting
        if is_clearing and spawn is not None and spawn is not asyncio.current_task():
            await asyncio.wait([spawn], timeout=CLEARING)

    async def poll(self) -> Any:
        """As the engine says; a server whose member has yet to come is watched meanwhile."""
        status = await super().poll()
        if status is None:
            await self._remember()
            self.watch_claim()
        return status

    async def _remember(self) -> None:
        """Find the lease of a server that ran before this hub did; once, it is in the store. And
        give the lease the name that its member has by now."""
        with suppress(GPUSpawnerError):  # the next poll asks again
            if self.lease is None and self._spawn is None and not self._looked_up:
                leases = await self.broker.run(self.broker.open_leases)
                self.lease = next((each for each in leases if self._is_mine(each)), None)
                self._looked_up = True
                if self.lease is not None:
                    self.lease_id = self.lease.id
            if self.lease is not None and self.lease.server != self.server_ref:
                follow = self.broker.follow_rename
                self.lease = await self.broker.run(follow, self.lease.id, self.server_ref)
        lease, is_earlier = self.lease, self._spawn is None
        if lease is None or lease.state is not LeaseState.GRANTED or not is_earlier:
            return
        if self._adopting is None or self._adopting.done():  # one that failed is tried again
            self._adopting = asyncio.ensure_future(self._adopt(lease))

    def _is_mine(self, lease: Lease) -> bool:
        """Return True for the lease in the Hub's state, or in its absence that of this name: a hub
        that was killed while it started a server had no time to keep the state."""
        return lease.id == self.lease_id if self.lease_id else lease.server == self.server_ref

    async def _adopt(self, lease: Lease) -> None:
        """Confirm the lease of a server that an earlier hub was starting, when it answers.

        What fails is tried again at the next poll: until it is confirmed, a server costs nothing.
        The accounting service does the same when it looks next; the member may stop it before.
        """
        try:
            await self._wait_ready(await self.get_url())
            started_at = await self.engine_started_at()
            confirm = self.broker.confirm
            confirmed = await self.broker.run(
                confirm, lease.id, self.engine_ref(), started_at=started_at
            )
        except (GPUSpawnerError, OSError) as error:
            self.log.warning("%s is not adopted yet: %s", self.server_ref, error)
            return
        if self.lease is lease:
            self.lease = confirmed

    def watch_claim(self) -> None:
        """See to it that the member of a server from the queue comes in time."""
        waits = self.lease is not None and self.lease.claim_by is not None
        if waits and (self._claim is None or self._claim.done()):
            self._claim = asyncio.ensure_future(no_shows.watch(self))

    async def _too_slow(self) -> StartFailed:
        """What to say of a start that ``start_timeout`` ended; JupyterHub would say nothing."""
        await self.failure_detail()
        took = f"it was not up within {self.start_timeout} seconds"
        return StartFailed(cause=f"{took} (it got as far as: {self.said.last})")

    def engine_ref(self) -> str:
        """The engine's own name of this server."""
        return ""

    async def engine_started_at(self) -> datetime | None:
        """When the engine started this server, by its wall clock; None when nobody knows."""
        return None

    async def _wait_ready(self, url: Any) -> None:
        """Wait until the server answers or has provably ended: one that ends early fails at once,
        with its reason.

        An open port proves nothing (Docker's proxy accepts for a container that does not
        listen yet), so this asks over HTTP, as the Hub would after us.
        """
        address = self._server_url(url)
        ssl_context = self._hub_ssl_context()

        looked_at = 0.0

        async def answered_or_gone() -> bool:
            nonlocal looked_at
            if await answers(address, ssl_context):
                return True
            if time.monotonic() - looked_at < LOOK_AFTER:
                return False
            looked_at = time.monotonic()
            if (await self.poll()) is not None:
                detail = await self.failure_detail()
                raise StartFailed(cause=detail or "it exited at once")
            return False

        if await answers(address, ssl_context):
            return
        await asyncio.sleep(ASK_AGAIN)
        message = f"{self.server_ref} did not answer at {address}"
        try:
            await exponential_backoff(
                answered_or_gone,
                message,
                start_wait=ASK_AGAIN,
                max_wait=ASK_SELDOM,
                timeout=self.http_timeout,
            )
        except AnyTimeoutError:
            self.log.error("%s. %s", message, await self.failure_detail())
            cause = f"it did not answer within {self.http_timeout} seconds"
            raise StartFailed(cause=cause) from None

    def _server_url(self, started: Any) -> str:
        """The API of the server, from what ``start`` returned: an URL or (ip, port)."""
        if not isinstance(started, str):
            ip, port = started
            scheme = "https" if self.internal_ssl else "http"
            started = f"{scheme}://{f'[{ip}]' if ':' in ip else ip}:{int(port)}"
        parsed = urlparse(started)
        return f"{parsed.scheme}://{parsed.netloc}{self.server.base_url}api"

    def _hub_ssl_context(self) -> Any:
        names = ("internal_ssl_key", "internal_ssl_cert", "internal_ssl_ca")
        key, cert, ca = (self.hub_settings.get(name) for name in names)
        return make_ssl_context(key, cert, cafile=ca)

    async def progress(self) -> AsyncIterator[dict[str, Any]]:
        """What this spawn does, as it happens."""
        async for event in self.said.follow():
            yield event

    # 3. Release.

    async def stop(self, now: bool = False) -> None:
        """Stop the server; the lease is settled up to this moment."""
        await super().stop(now=now)
        self.stopped_at = self.stopped_at or self.broker.clock()

    def run_post_stop_hook(self) -> Any:
        """Release, then the admin's own ``post_stop_hook``."""
        return self._release_then_hook()

    async def _release_then_hook(self) -> None:
        released = False
        try:
            await self._leave_line()
            released = await self._release("stopped")
        except GPUSpawnerError as error:
            self.log.error(
                "Lease %s of %s stays until the accounting service settles it: %s",
                self.lease_id,
                self.server_ref,
                error.message,
            )
        finally:
            if not released:
                await self._give_up()
            hook = super().run_post_stop_hook()
            if inspect.isawaitable(hook):
                await hook

    async def _give_up(self) -> None:
        """Note on a lease that stays that its start was ended, and not lost with its hub."""
        if self.lease is not None and self._acquiring is not None:
            with suppress(GPUSpawnerError):
                await self.broker.run(self.broker.give_up, self.lease.id, "stopped")

    async def _release(self, reason: str) -> bool:
        """Release the lease once the server is proved gone. Whether it was."""
        if self._acquiring is not None and not self._acquiring.done():
            await asyncio.wait([self._acquiring])
        if self.lease is None:
            self.lease = await self.broker.run(self.broker.lease_of, self.server_ref)
        if self.lease is None:
            return False
        self.lease_id = self.lease.id
        proof = await self.prove_gone()
        if not proof.gone:
            # The Hub has let go of it, so nobody can reach it any more: end it.
            await self.end_leftover()
            proof = await self.prove_gone()
        if not proof.gone:
            why = f" ({proof.detail})" if proof.detail else ""
            self.log.warning("%s is not proved gone: its lease stays%s", self.server_ref, why)
            return False
        await self.broker.run(
            self.broker.release,
            self.lease_id,
            # A busy engine answers long after the end, and knows when that was.
            ended_at=proof.ended_at or self.finished_at,
            stopped_at=self.stopped_at or self.seen_alive_at,
            reason=proof.detail or reason,
            # An earlier hub's process started it, and nobody stopped it.
            lost=self._acquiring is None and self.stopped_at is None,
        )
        self.lease, self.lease_id, self.seen_alive_at = None, "", None
        self.finished_at = None
        self.queueing.kick()
        return True

    # State and environment.

    def get_state(self) -> dict[str, Any]:
        """Adds the lease's id; the store stays the truth."""
        state: dict[str, Any] = super().get_state()
        if self.lease_id:
            state["lease_id"] = self.lease_id
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.lease_id = state.get("lease_id", "")

    def get_env(self) -> dict[str, str]:
        """The server's environment; everything about GPUs is set anew, last, from the lease."""
        return self.with_lease_environment(super().get_env())

    def with_lease_environment(self, env: dict[str, str]) -> dict[str, str]:
        """``env`` with the lease's variables in place of whatever was there."""
        lease = self.lease
        devices = lease.devices if lease else ()
        env.pop("CUDA_VISIBLE_DEVICES", None)
        if devices:
            env.setdefault("NVIDIA_DRIVER_CAPABILITIES", "compute,utility")
        env.update(
            NVIDIA_VISIBLE_DEVICES=",".join(d.uuid for d in devices) or "void",
            CUDA_DEVICE_ORDER="PCI_BUS_ID",
            GPUSPAWNER_LEASE_ID=lease.id if lease else "",
            GPUSPAWNER_GPU_COUNT=str(len(devices)),
            GPUSPAWNER_GPU_UUIDS=",".join(d.uuid for d in devices),
            GPUSPAWNER_GPU_MODELS=",".join(d.model for d in devices),
            GPUSPAWNER_RATE=format_credits(lease.rate if lease else 0, places=6),
            GPUSPAWNER_ENVIRONMENT=lease.environment if lease else "",
        )
        return env

    def apply_environment(self, environment: Environment) -> None:
        """Set the spawner's traits from the chosen entry of the catalog."""
        for trait in ("mem_limit", "cpu_limit"):
            if (value := getattr(environment, trait)) is not None:
                setattr(self, trait, value)
        # An entry that says nothing has /lab, which is no reason to overrule the admin.
        if self.catalog and (
            environment.default_url != "/lab" or not self.is_configured("default_url")
        ):
            self.default_url = environment.default_url
        if environment.environment:
            configured = cast("dict[str, Any]", self.environment)
            self.set_trait("environment", {**configured, **environment.environment})
        self.chosen = environment
        if environment.spawner_override:
            self._apply_overrides(dict(environment.spawner_override))


def _no_engine(spawner: GPUSpawnerMixin, method: str) -> str:
    """For who writes a spawner of their own."""
    return (
        f"{type(spawner).__name__} has no {method}(): GPUSpawnerMixin leases GPUs, and a spawner "
        "that builds on it has to say where its servers live, as GPUDockerSpawner and "
        "GPULocalSpawner do."
    )
