"""The part of a spawner that all engines share: lease, progress, environment and state.

1. ``run_pre_spawn_hook`` checks the options, waits for the comparison after a hub start, acquires
   the lease (on disk before anything exists), then runs the admin's own hook.
2. ``start`` lets the engine start the server, and confirms the lease when the server answers.
3. ``run_post_stop_hook``, which JupyterHub always calls, releases and settles the lease once the
   engine proves the server gone, then runs the admin's own hook. Without that proof, the lease
   stays open, and the accounting service settles it later.
"""

from __future__ import annotations

import asyncio
import importlib.resources
import inspect
import json
from collections.abc import AsyncIterator, Iterator, Mapping, MutableMapping
from collections.abc import Callable as Function
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from functools import cache, cached_property, partial
from typing import Any, TypeVar, cast
from urllib.parse import urlparse

import sqlalchemy as sa
from jupyterhub.spawner import Spawner
from jupyterhub.traitlets import Callable
from jupyterhub.utils import AnyTimeoutError, make_ssl_context, maybe_future
from tornado.web import HTTPError
from traitlets import Any as AnyTrait
from traitlets import Float, Integer, List, Unicode, Union, default

from ..catalog.loader import Catalog, WatchedCatalog, watched
from ..catalog.models import DeviceLimits, Environment, SessionHours
from ..core.errors import (
    ConfigError,
    GPUSpawnerError,
    InvalidRequest,
    MemberGone,
    Refused,
    ServerHasLease,
    StartFailed,
    TicketEnded,
    Unavailable,
)
from ..core.units import format_credits
from ..engines.base import Engine
from ..engines.injection import framework_hints
from ..leases.host_resources import NOTHING, HostAmount
from ..leases.models import Lease, LeasedDevice, LeaseKind, LeaseState, Request, ServerRef, Terms
from ..ledger.rules import check_payer
from ..queue.models import Ticket
from ..runs.models import Run
from ..services import Services, hub_services
from . import options
from .compat import SpawnException
from .form import SpawnForm, defines_form, defines_options, note_of_link, templates
from .no_shows import HubRecords
from .progress import FailedSpawn, SpawnProgress
from .readiness import StartTime, wait_for_answer
from .recovery import Recovery, end_waits_first, recovery_of
from .turns import Acquisition, StartsWithoutGPU, TurnDispatcher, queue_card, what_you_got

T = TypeVar("T")

COMPARING = 30.0
"""Most seconds that a start waits for the comparison after a hub start. One resumed from the queue
may wait for ``start_timeout``."""

MISCONFIGURED = (
    "This hub is not set up correctly. Tell your admin, who finds the reason in its log."
)

CLEARING = 60.0
"""Seconds that the Hub waits for the cleanup after a failed start."""


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """What an engine proved about a server's end; it raises EngineUnavailable if it cannot tell."""

    gone: bool
    ended_at: datetime | None = None
    detail: str = ""
    """How it ended, in words."""
    forgotten: bool = False
    """True if the external scheduler has forgotten the server, which alone proves nothing."""


@cache
def _catalog_without_file() -> Catalog:
    return Catalog.single(devices=DeviceLimits(default=1, max=options.MOST_GPUS))


class GPUSpawnerMixin(Spawner):
    """Mixin that gives the servers of a Spawner class leases; put it before that class.

    An engine adds :meth:`engine`, :meth:`prove_gone` and how a lease reaches a server.
    """

    engine_name = ""
    """The name, stored in leases, of the engine that can prove a server gone."""

    catalog = Unicode(
        config=True,
        help="""
        The YAML file with the environments that members choose from.

        Without it there is a single environment: the spawner's own image. An edit takes effect at
        the next form or start. An invalid edit changes nothing, and is reported in the log and to
        admins on the form. Example::

            c.GPUSpawnerMixin.catalog = "/etc/gpuspawner/catalog.yaml"
        """,
    )

    gpu_limit = Union(
        [Integer(), Callable()],
        default_value=8,
        config=True,
        help="""
        The most GPUs that one server may have. An environment may allow fewer.

        A number, or a callable that takes the spawner. ``group_overrides`` can set it for a group.
        Example::

            c.GPUSpawnerMixin.gpu_limit = 2
            c.GPUSpawnerMixin.gpu_limit = lambda spawner: 4 if spawner.user.admin else 1
        """,
    )

    extra_options = List(
        Unicode(),
        config=True,
        help="""
        Fields of ``user_options`` that only your own hooks and callables read, such as
        ``pre_spawn_hook`` or a callable in ``environment``.

        They come by REST or from a form, and are passed on unchecked. Other unknown fields are
        refused, unless you have a form of your own. Example::

            c.GPUSpawnerMixin.extra_options = ["course"]
        """,
    )

    default_hours = Union(
        [Float(), Callable()],
        default_value=None,
        allow_none=True,
        config=True,
        help="""
        Hours that a server with a GPU may run if its member does not choose.

        A number, or a callable that takes the spawner. None: as long as ``most_hours``. An
        environment of the catalog can set its own default. Example::

            c.GPUSpawnerMixin.default_hours = 8
        """,
    )

    most_hours = Union(
        [Float(), Callable()],
        default_value=None,
        allow_none=True,
        config=True,
        help="""
        The most hours that one session with a GPU may last. An environment may allow fewer.

        A number, or a callable that takes the spawner. ``group_overrides`` can set it for a group.
        None: no limit, and a session has an end only if the member asks for one. Servers without a
        GPU have no end. Example::

            c.GPUSpawnerMixin.most_hours = 24
            c.GPUSpawnerMixin.most_hours = lambda spawner: 72 if spawner.user.admin else 12
        """,
    )

    services = AnyTrait(help="The services; shared by all spawners of a hub through its settings.")

    @default("services")
    def _default_services(self) -> Services:
        return hub_services(self.hub_settings, self.config, self.log)

    @default("apply_user_options")
    def _default_apply_user_options(self) -> Any:
        # Our options are applied in run_pre_spawn_hook, after the group overrides.
        return lambda spawner, user_options: None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.chosen: Environment | None = None
        self.asked: options.FormChoice | None = None
        """The choices of the link that opened the form."""
        self.refused: options.FormChoice | None = None
        """The same if these are the choices of a form that was refused, which shows them again."""
        self.asked_beside: Mapping[str, list[str]] = {}
        """The link's values for the admin's own fields, by name."""
        self.ticket: Ticket | None = None
        """The ticket with which this spawn waits in the queue; None if it does not wait."""
        self.lease: Lease | None = None
        self.lease_id = ""
        self.last_started: dict[str, Any] = {}
        self.touched = True
        """True if the engine was asked to create anything since the lease was acquired."""
        self.said = SpawnProgress()
        self.seen_alive_at: datetime | None = None
        self.stopped_at: datetime | None = None
        self.finished_at: datetime | None = None
        """When the server ended, by the engine's wall clock, if it reported that."""
        self._spawn: asyncio.Task[Any] | None = None
        """The Hub's task of the spawn, which also cleans up after a failed start."""
        self._is_starting = False
        """True from the beginning of that task until the server answers or the start fails."""
        self._claim: asyncio.Task[None] | None = None
        self._adopting: asyncio.Task[None] | None = None
        self._looked_up = False
        self.run: Run | None = None
        """The run whose program this starts in the place of a server; None for a server."""

    # What an engine implements. A Spawner's metaclass does not support abstract methods, so the
    # first two raise an error if they are missing.

    def engine(self) -> Engine:
        """Return the engine for reconciliation."""
        raise self._lacks("engine")

    async def prove_gone(self) -> ExitStatus:
        """Check whether the server is gone. Raises EngineUnavailable if that is unknown."""
        raise self._lacks("prove_gone")

    def _lacks(self, method: str) -> NotImplementedError:
        return NotImplementedError(
            f"{type(self).__name__} has no {method}(): GPUSpawnerMixin leases GPUs, and a spawner "
            "that builds on it has to say where its servers live, as GPUDockerSpawner and "
            "GPULocalSpawner do."
        )

    async def failure_detail(self) -> str:
        """Describe why a started server has ended, for the log and the member; empty if unknown."""
        return ""

    def looks_first(self, request: Request) -> bool:
        """Return True if the member's files or image must be checked before asking for a lease."""
        return False

    async def look_at_files(self, request: Request) -> None:
        """Refuse a start if the member's files leave no room, or their image cannot be used."""

    async def open_workspace(self) -> None:
        """Create the member's workspace before their first start, if possible."""

    async def end_leftover(self) -> None:
        """End a server that the Hub considers stopped. The engine overrides this."""

    def engine_for(self, request: Request) -> str:
        """Return the name of the engine that will run a server of this request."""
        return self.engine_name

    def engine_ref(self) -> str:
        """Return the engine's own identifier of this server; empty if there is none."""
        return ""

    async def engine_started_at(self) -> datetime | None:
        """Return when the engine started this server, by its wall clock; None if unknown."""
        return None

    # Shared by all spawners of this hub.

    @property
    def hub_settings(self) -> MutableMapping[str, Any]:
        """The hub's settings, which also hold the objects that its spawners share."""
        settings: MutableMapping[str, Any] = self.user.settings
        return settings

    def shared(self, key: str, make: Function[[], T]) -> T:
        """Return the hub's object under ``key``, creating it on first use."""
        return kept_in(self.hub_settings, key, make)

    @property
    def queueing(self) -> TurnDispatcher:
        """The waiting spawns of this hub."""
        return self.shared("gpuspawner_queueing", lambda: TurnDispatcher(self.services, self.log))

    @property
    def recovery(self) -> Recovery:
        """The comparison that precedes the first grant of this hub."""
        return recovery_of(self.hub_settings, self.services, self.log)

    # This server, and how it asks for its lease.

    @property
    def server_ref(self) -> ServerRef:
        """The name of this server in the store."""
        return ServerRef(self.user.name, self.name or "")

    @cached_property
    def acquisition(self) -> Acquisition:
        """How this server gets its leases."""
        return Acquisition(self.queueing)

    # The catalog.

    @property
    def _watched(self) -> WatchedCatalog | None:
        return watched(self.user.settings, self.catalog, self.log) if self.catalog else None

    def load_catalog(self) -> Catalog:
        """Return the catalog of the current file, or the last valid one. Raises ConfigError."""
        if found := self._watched:
            return found.current()
        return _catalog_without_file()

    async def refresh_catalog(self) -> None:
        """Read the catalog's file if it has changed, off the event loop."""
        if found := self._watched:
            await found.refresh()

    def catalog_problem(self) -> str:
        """Return why the newest edit of the catalog is invalid, for admins only; else empty."""
        found = self._watched if self.user.admin else None
        return found.problem if found else ""

    @property
    def group_names(self) -> frozenset[str]:
        """The member's groups at the Hub."""
        return frozenset(group.name for group in self.user.groups)

    def most_gpus(self) -> int:
        """Return ``gpu_limit`` for this member."""
        return int(self._value_of("gpu_limit"))

    def usual_guarantee(self) -> HostAmount:
        """Return what the spawner's own traits guarantee, for environments that say nothing.

        Nothing if the host has no budget: then no callable of the admin's is called for it.
        """
        if self.services.leases.budget is None:
            return NOTHING
        return HostAmount.of(self._value_of("mem_guarantee"), self._value_of("cpu_guarantee"))

    def _value_of(self, trait: str) -> Any:
        value = getattr(self, trait)
        return value(self) if callable(value) else value

    # The admin's own form and options.

    @property
    def own_form_traits(self) -> tuple[str, ...]:
        """Traits that, once configured, put the spawner's own form above ours."""
        return ("options_form",)

    def shows_own_form(self) -> bool:
        """Return True if the form of the admin's configuration or class goes above ours."""
        cls: Any = type(self)
        return not self._configured.isdisjoint(self.own_form_traits) or defines_form(cls)

    def takes_foreign_options(self) -> bool:
        """Return True if the admin's configuration or class may read options that are not ours."""
        names = (*self.own_form_traits, "options_from_form", "apply_user_options")
        cls: Any = type(self)
        return not self._configured.isdisjoint(names) or defines_options(cls)

    @property
    def choice(self) -> options.FormChoice:
        """Our part of this start's ``user_options``, which are never trusted."""
        return self.parse_options(self.user_options or {})

    def parse_options(self, fields: Mapping[str, Any]) -> options.FormChoice:
        """Parse our part of ``user_options``. Raises InvalidRequest for fields nobody reads."""
        foreign = self.takes_foreign_options()
        try:
            return options.parse(fields, foreign=foreign, extra=self.extra_options)
        except InvalidRequest as error:
            self.log.info(
                "%s (If a hook of yours reads it, name it in c.GPUSpawnerMixin.extra_options.)",
                error.message,
            )
            raise

    def is_configured(self, trait: str) -> bool:
        """Return True if the admin set a trait on this class or one of its bases."""
        return trait in self._configured

    @property
    def _configured(self) -> frozenset[str]:
        """The names of all traits that the admin set, determined once per class of a hub."""
        kept: dict[Any, frozenset[str]]
        kept = self.user.settings.setdefault("gpuspawner_configured", {})
        of_class = (type(self), id(self.config))  # neither changes while a hub runs
        if of_class not in kept:
            kept[of_class] = frozenset(
                name
                for cls in type(self).__mro__
                if cls.__name__ in self.config
                for name in self.config[cls.__name__]
            )
        return kept[of_class]

    # Options.

    def run_options_from_form(self, form_data: Mapping[str, list[Any]]) -> Any:
        """Return ``user_options`` from the form: ours validated, others as the admin reads them.

        Returns a dictionary, or an awaitable of one if ``options_from_form`` returns that.
        """
        self.asked, self.asked_beside = None, {}  # the form that was sent replaces any link
        ours = {name: form_data[name] for name in options.FIELDS if name in form_data}
        rest = {
            name: value
            for name, value in form_data.items()
            if name not in (*options.FIELDS, *options.IGNORED, options.INSTEAD)
        }
        try:
            choice = options.parse(ours).instead(form_data.get(options.INSTEAD, [""])[0])
            self.parse_options(rest)
        except GPUSpawnerError as error:
            raise self.refusal(error) from None
        extra = {
            name: rest[name][0] if len(rest[name]) == 1 else rest[name]
            for name in self.extra_options
            if name in rest
        }
        ours = choice.as_user_options()
        own: Any = super().run_options_from_form(rest) if self.takes_foreign_options() else {}

        async def joined() -> dict[str, Any]:
            return {**extra, **await own, **ours}

        return joined() if inspect.isawaitable(own) else {**extra, **own, **ours}

    def resolve_options(self) -> tuple[Environment, Request]:
        """Return the environment and the request of this start, from ``user_options``."""
        if self.run is None and self.server_ref.kind is LeaseKind.RUN:  # JupyterHub 5 allows colons
            raise InvalidRequest("The name of a server cannot begin with 'run:'.", field="name")
        choice = self.choice
        if self.catalog and "image" in (self.user_options or {}):
            raise InvalidRequest(
                "The image comes with the environment: choose that instead.", field="image"
            )
        environment = options.choose_environment(self.load_catalog(), choice, self.group_names)
        usual = self.usual_guarantee()
        return environment, options.resolve(choice, environment, self.most_gpus(), usual)

    def terms(self, environment: Environment, request: Request) -> Terms:
        """Return the terms on which this start asks for its devices.

        Raises TooMuchAsked, or NotAllowed for an account that the member may not draw on.
        """
        choice, groups, seconds = self.choice, self.group_names, None
        if request.devices:
            hours = self.session_hours(environment)
            seconds = options.session_seconds(choice, hours, environment)
        if choice.account:
            check_payer(choice.account, self.user.name, groups)
        return Terms(
            groups=groups,
            account=choice.account or "",
            seconds=seconds,
            options=dict(self.user_options or {}),
            wait=choice.wait is not False,
            shown_at=datetime.fromisoformat(choice.shown_at) if choice.shown_at else None,
            since=self.run.created_at if self.run and self.run.restarts else None,
            preemptible=self.run is not None and self.run.preemptible,
        )

    def session_hours(self, environment: Environment) -> SessionHours:
        """Return the default and maximum hours for this member in this environment.

        Raises ConfigError if a setting is invalid.
        """
        usual = options.hours_setting("default_hours", self._value_of("default_hours"))
        most = options.hours_setting("most_hours", self._value_of("most_hours"))
        return options.combine(environment.hours, SessionHours(default=usual, max=most))

    def refusal(self, error: GPUSpawnerError) -> FailedSpawn:
        """Convert a domain error to what JupyterHub shows: why, and what the member can do now.

        Only admins read which setting is wrong; otherwise the log says it.
        """
        if isinstance(error, ConfigError) and not self.user.admin:
            self.log.error("%s did not start: %s", self.server_ref, error.message)
            error = GPUSpawnerError(MISCONFIGURED)
        failed = FailedSpawn(error)
        choice, can_do_without = options.FormChoice(), False
        with suppress(GPUSpawnerError):  # what was asked for may be the very thing that is wrong
            choice = options.parse(self.user_options or {}, foreign=True)
            chosen = options.choose_environment(self.load_catalog(), choice, self.group_names)
            can_do_without = chosen.cpu_variant
        ways = error.ways_on if isinstance(error, Refused) else ()
        failed.links = {
            name: choice.instead(name).as_query()
            for name in (*ways, "")
            if name != "cpu" or can_do_without
        }
        failed.jupyterhub_html_message = templates.get_template("gpuspawner/refusal.html").render(
            refusal=failed, instead=options.INSTEAD
        )
        return failed

    def _refused(self, error: GPUSpawnerError) -> FailedSpawn:
        """Return the refusal of this start; JupyterHub shows the form again, as it was sent."""
        with suppress(GPUSpawnerError):
            self.asked = self.refused = options.parse(self.user_options or {}, foreign=True)
        return self.refusal(error)

    @contextmanager
    def in_words(self) -> Iterator[None]:
        """Raise every error of a start so that the member reads a sentence.

        JupyterHub shows the text of any error. One that nobody expected has words for developers
        only: they go to the log.
        """
        try:
            yield
        except GPUSpawnerError as error:
            raise self._refused(error) from error
        except (HTTPError, SpawnException):
            raise
        except Exception as error:
            if hasattr(error, "jupyterhub_message"):
                raise
            self.log.error("%s did not start", self.server_ref, exc_info=error)
            cause = "an unexpected error occurred (tell your admin)"
            raise self.refusal(StartFailed(cause=cause)) from error

    # The form, and links that fill it in.

    @cached_property
    def spawn_form(self) -> SpawnForm:
        """The spawn form: what this member may choose from, and chose."""
        return SpawnForm(self)

    async def run_auth_state_hook(self, auth_state: Any) -> None:
        """Run the admin's hook; if a link opens the form, also take the link's choice.

        This is the last method that JupyterHub calls before it would start a server with the
        options of the link.
        """
        await super().run_auth_state_hook(auth_state)
        await self.spawn_form.take_link(getattr(self, "handler", None))

    async def options_from_query(self, query_data: Mapping[str, list[Any]]) -> dict[str, Any]:
        """Raise SpawnException, because a link never starts a server."""
        await self.spawn_form.refuse_link(query_data)

    async def get_options_form(self) -> str:
        """Return the admin's own form, if any, then environments, GPUs and the balance."""
        own = (await super().get_options_form() if self.shows_own_form() else "") or ""
        own += note_of_link(own, self.asked_beside, self.extra_options)
        return own + await self.spawn_form.render()

    # 1. Acquire.

    def run_pre_spawn_hook(self) -> Any:
        """Acquire the lease, then run the admin's own ``pre_spawn_hook``."""
        if (found := self._watched) and found.is_due():
            return self._refresh_then_hook()
        self._begin_progress()
        self.stopped_at = self.finished_at = None
        self._spawn = asyncio.current_task()
        self._is_starting = True
        try:
            with self.in_words():
                environment, request = self.resolve_options()
                terms = self.terms(environment, request)
                self.apply_environment(environment)
                if self.recovery.is_done and not self.looks_first(request):
                    # Ask now, and not when the event loop returns to this spawn: if very many start
                    # at once, it would serve all the others first.
                    self._ask(request, terms)
        except Exception:
            self._is_starting = False
            raise
        return self._acquire_then_hook(request, terms)

    async def _refresh_then_hook(self) -> None:
        await self.refresh_catalog()
        await self.run_pre_spawn_hook()

    async def _acquire_then_hook(self, request: Request, terms: Terms) -> None:
        try:
            self.lease = await self._acquire_in_words(request, terms)
            self.lease_id = self.lease.id
            self.said.say(what_you_got(self.lease), 10)
            if (hook := super().run_pre_spawn_hook()) is not None:
                await maybe_future(hook)
        except BaseException as error:
            self._is_starting = False
            if isinstance(error, GPUSpawnerError):
                raise self._refused(error) from error
            raise

    async def _acquire_in_words(self, request: Request, terms: Terms) -> Lease:
        """Acquire the lease. Raises FailedSpawn; what the admin's hook raises is the hook's own."""
        with self.in_words():
            await self._prepare(request)
            return await self._acquire(request, terms)

    async def _prepare(self, request: Request) -> None:
        """Do what precedes the request for a lease."""
        try:
            await self.await_comparison()
            if self.looks_first(request):
                await self.look_at_files(request)
        except asyncio.CancelledError:
            self.acquisition.leave(self.server_ref)
            raise

    async def await_comparison(self) -> None:
        """Wait for the comparison after a hub start, with progress.

        A start resumed from the queue waits as long as a start may take; others are refused sooner.
        """
        patience: float = self.start_timeout
        if not self.recovery.is_compared:
            ticket_of = self.services.queue.ticket_of
            if await self.services.run(ticket_of, self.server_ref) is None:
                patience = min(patience, COMPARING)
        say = partial(self.said.say, percent=2)
        await self.recovery.wait(
            self.engine_name, self.engine, self.user.db, patience=patience, say=say
        )

    async def _acquire(self, request: Request, terms: Terms) -> Lease:
        try:
            return await self._grant(request, terms)
        except ServerHasLease:
            await self._settle_previous()
        return await self._grant(request, terms)

    def _ask(self, request: Request, terms: Terms) -> None:
        """Begin to ask for a lease; :meth:`_grant` takes the answer."""
        engine = self.engine_for(request)
        asked = self.queueing.ask(
            self.server_ref, request, engine=engine, terms=terms, said=self.said
        )
        self.acquisition.begin(asked)

    async def _grant(self, request: Request, terms: Terms) -> Lease:
        if not self.acquisition.is_asked:
            self._ask(request, terms)
        got = await self.acquisition.answer()
        if isinstance(got, Ticket):
            self.ticket = got
            try:
                got = await self._wait_in_line(got)
            except StartsWithoutGPU:
                ours = self.choice.instead("cpu").as_user_options()
                said = (self.user_options or {}).items()
                rest = {name: value for name, value in said if name not in options.FIELDS}
                self.set_trait("user_options", {**rest, **ours})
                environment, request = self.resolve_options()
                return await self._grant(request, self.terms(environment, request))
            finally:
                self.ticket = None
        self.touched = False
        return got

    async def _wait_in_line(self, ticket: Ticket) -> Lease:
        """Wait for the ticket's turn; the pending page shows its position and the estimate."""
        chosen: Environment | None = None

        def still_allowed() -> Terms:
            nonlocal chosen
            self._must_be_there(ticket.server)
            chosen, request = self.resolve_options()
            # What no member asks for may change meanwhile: driver requirements and guarantees.
            kept = {name: getattr(request, name) for name in ("min_driver", "min_cuda")}
            if request != replace(ticket.request, **kept, **request.host.as_fields()):
                raise TicketEnded(why="you may no longer use what you asked for")
            terms = self.terms(chosen, request)
            check_payer(ticket.account, ticket.server.user, terms.groups)
            return terms

        end_waits_first(self.authenticator, self.queueing)
        lease = await self.acquisition.wait(ticket, still_allowed, self.said)
        if chosen is not None:
            self.apply_environment(chosen)  # the catalog may have changed since the request
        return lease

    async def queue_card(self) -> str:
        """Return what the pending page shows of the wait in the queue, as HTML; else empty."""
        ticket, services = self.ticket, self.services
        if ticket is None:
            return ""
        with suppress(GPUSpawnerError):  # the page then shows what the last round found
            standings = await services.read(services.positions.standings)
            if ticket.id in standings:
                return queue_card(standings[ticket.id], services.clock())
        return ""

    @property
    def can_start_without_gpu(self) -> bool:
        """True if a start waits for a GPU, and its environment runs without one, too."""
        if self.ticket is None or not self.ticket.request.devices:
            return False
        return self.chosen is not None and self.chosen.cpu_variant

    async def start_without_gpu(self) -> None:
        """Leave the queue, and go on with this start without a GPU. Raises Refused."""
        if self.ticket is None:
            return
        choice = self.choice.instead("cpu")
        environment = options.choose_environment(self.load_catalog(), choice, self.group_names)
        options.resolve(choice, environment, self.most_gpus())
        await self.queueing.stop_waiting(self.ticket.id)

    def _must_be_there(self, server: ServerRef) -> None:
        """Raise MemberGone if the server's member was renamed or removed at the Hub.

        Raises Unavailable for a run of a renamed member.
        """
        if self.server_ref != server:
            if self.run is not None:  # it keeps its place until its records have the new name
                raise Unavailable(f"{server}: its member was renamed to {self.user.name}.")
            raise MemberGone(why="the member was renamed")
        if not sa.inspect(self.user.orm_user if self.run else self.orm_spawner).persistent:
            raise MemberGone(why="the member was removed")

    async def _settle_previous(self) -> None:
        """Release the lease that an earlier start of this server left, or raise ServerHasLease."""
        self.lease = await self.services.run(self.services.leases.of_server, self.server_ref)
        if self.lease is None:
            return
        self.log.warning("%s still has lease %s: settling it", self.server_ref, self.lease.id)
        await self._release("left over from an earlier start")
        if self.lease is not None:
            raise ServerHasLease()

    # 2. Start.

    async def start(self) -> Any:
        """Start the server, wait until it answers, and confirm the lease.

        As with other spawners, ``start_timeout`` limits the engine's part, and ``http_timeout`` the
        wait that follows. This waits itself and does not leave it to the Hub, so that a server that
        ends early fails at once, with its reason.
        """
        if self.lease is None:
            raise self.refusal(StartFailed(cause="it holds no lease"))
        taken = StartTime(self.start_timeout, self._spawn)
        try:
            url = await super().start()
            self.said.say("Waiting for the server to answer", 80)
            await taken.outlast(self._confirm_ready(url))
        except GPUSpawnerError as error:
            raise self.refusal(error) from error
        except asyncio.CancelledError:
            if not taken.is_up():
                raise
            raise self.refusal(await self._too_slow()) from None
        finally:
            self._is_starting = False
        self.seen_alive_at = self.services.clock()
        self.last_started = self.choice.as_user_options()
        self.said.say("The server answers", 95)
        self.watch_claim()
        return url

    async def _confirm_ready(self, url: Any) -> None:
        asked = asyncio.ensure_future(self.engine_started_at())
        try:
            if self.run is None:
                await self._wait_ready(url)
            started_at = await asked
        finally:
            asked.cancel()
        self._require_wanted()
        lease = cast("Lease", self.lease)
        self.lease = await self.services.run(
            self.services.leases.confirm,
            lease.id,
            self.engine_ref(),
            started_at=started_at,
            devices=lease.devices,
        )
        if self.lease.state is LeaseState.ENDED:
            raise StartFailed(cause="its lease was ended before it answered")

    async def cleared(self) -> None:
        """Wait for the cleanup after a failed start; an engine's ``poll`` calls this.

        If the cleanup takes longer than ``slow_spawn_timeout``, the Hub polls the server, and a
        second later reports "failed to start" and not the cause. A start that still runs is not
        waited for: a Hub that shuts down stops it from outside, and must not wait for a pull.
        """
        spawn = self._spawn  # after a failure, this task polls as well
        is_clearing = self.pending == "stop" and not self._is_starting
        if is_clearing and spawn is not None and spawn is not asyncio.current_task():
            await asyncio.wait([spawn], timeout=CLEARING)

    async def poll(self) -> Any:
        """Return the engine's status. Also watch a server that its member has yet to claim."""
        status = await super().poll()
        if status is None:
            await self._remember()
            self.watch_claim()
        return status

    async def _remember(self) -> None:
        """Find the lease of a server that started before this hub did, and confirm it if needed.

        The store is searched once. A lease of a member who was renamed gets the new name.
        """
        with suppress(GPUSpawnerError):  # the next poll tries again
            if self.lease is None and self._spawn is None and not self._looked_up:
                leases = await self.services.run(self.services.leases.open_leases)
                self.lease = next((each for each in leases if self._is_mine(each)), None)
                self._looked_up = True
                if self.lease is not None:
                    self.lease_id = self.lease.id
            if self.lease is not None and self.lease.server != self.server_ref:
                follow = self.services.leases.follow_rename
                self.lease = await self.services.run(follow, self.lease.id, self.server_ref)
        lease, is_earlier = self.lease, self._spawn is None
        if lease is None or lease.state is not LeaseState.GRANTED or not is_earlier:
            return
        if self._adopting is None or self._adopting.done():  # a failed attempt is repeated
            self._adopting = asyncio.ensure_future(self._adopt(lease))

    def _is_mine(self, lease: Lease) -> bool:
        """Return True if the Hub's state has this lease, or has none and the server's name fits.

        A hub that was killed while it started a server could not save the state.
        """
        return lease.id == self.lease_id if self.lease_id else lease.server == self.server_ref

    async def _adopt(self, lease: Lease) -> None:
        """Confirm the lease of a server that an earlier hub was starting, once it answers.

        A failure is retried at the next poll; an unconfirmed server costs nothing. The accounting
        service does the same in its next round, and the member may stop the server meanwhile.
        """
        if self.server is None:
            return  # stopped already
        try:
            await self._wait_ready(await self.get_url())
            started_at = await self.engine_started_at()
            confirmed = await self.services.run(
                self.services.leases.confirm, lease.id, self.engine_ref(), started_at=started_at
            )
        except (GPUSpawnerError, OSError) as error:
            if self.server is not None:
                self.log.warning("%s is not adopted yet: %s", self.server_ref, error)
            return
        if self.lease is lease:
            self.lease = confirmed

    def watch_claim(self) -> None:
        """Start to watch whether the member of a server from the queue connects in time."""
        waits = self.lease is not None and self.lease.claim_by is not None
        if waits and (self._claim is None or self._claim.done()):
            self._claim = asyncio.ensure_future(self.await_claim())

    async def await_claim(self) -> None:
        """Record that the member connected, or order the stop when the deadline has passed."""
        services = self.services
        records: HubRecords = self.shared("gpuspawner_activity", HubRecords)
        while (lease := self.lease) is not None and lease.claim_by is not None:
            try:
                # The Hub records activity by the wall clock.
                since = (lease.up_since or lease.granted_at) + min(services.time.skew, timedelta())
                if await records.has_connected(self, since):
                    self.lease = await services.run(services.sessions.claim, lease.id)
                    return
                if services.clock() >= lease.claim_by:
                    await services.run(services.sessions.no_show, lease.id)
                    self.log.warning("%s: no connection in time", self.server_ref)
                    return
            except GPUSpawnerError as error:
                self.log.warning("%s: %s", self.server_ref, error.message)

    async def _too_slow(self) -> StartFailed:
        """Return the error of a start that ``start_timeout`` ended; JupyterHub gives no reason."""
        await self.failure_detail()
        took = f"it was not up within {self.start_timeout} seconds"
        return StartFailed(cause=f"{took} (it got as far as: {self.said.last})")

    async def _wait_ready(self, url: Any) -> None:
        """Wait until the server answers.

        Raises StartFailed with the reason as soon as the server has provably ended, or after
        ``http_timeout``.
        """
        address = self._server_url(url)
        names = ("internal_ssl_key", "internal_ssl_cert", "internal_ssl_ca")
        key, cert, ca = (self.hub_settings.get(name) for name in names)
        tls = make_ssl_context(key, cert, cafile=ca)
        try:
            await wait_for_answer(address, tls, self._require_alive, self.http_timeout)
        except AnyTimeoutError:
            detail = await self.failure_detail()
            self.log.error("%s did not respond at %s. %s", self.server_ref, address, detail)
            cause = f"it did not respond within {self.http_timeout} seconds"
            raise StartFailed(cause=cause) from None

    async def _require_alive(self) -> None:
        if (await self.poll()) is not None:
            detail = await self.failure_detail()
            raise StartFailed(cause=detail or "it exited at once")

    def _require_wanted(self) -> None:
        """Raise StartFailed if the server was stopped: the Hub may let its start go on."""
        if self.server is None:
            raise StartFailed(cause="it was stopped before it answered")

    def _server_url(self, started: Any) -> str:
        """Return the URL of the server's API, from what ``start`` returned: a URL or (ip, port).

        Raises StartFailed if the server was stopped.
        """
        self._require_wanted()
        if not isinstance(started, str):
            ip, port = started
            scheme = "https" if self.internal_ssl else "http"
            started = f"{scheme}://{f'[{ip}]' if ':' in ip else ip}:{int(port)}"
        parsed = urlparse(started)
        return f"{parsed.scheme}://{parsed.netloc}{self.server.base_url}api"

    async def progress(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the progress of this spawn as it happens.

        Who begins to follow before the spawn does has the messages of the last one, and goes on.
        """
        said = None
        while said is not self.said:
            said = self.said
            async for event in said.follow():
                yield event

    def _begin_progress(self) -> None:
        earlier, self.said = self.said, SpawnProgress()
        earlier.close()

    # 3. Release.

    async def stop(self, now: bool = False) -> None:
        """Stop the server; the lease is settled up to this moment."""
        await super().stop(now=now)
        self.stopped_at = self.stopped_at or self.services.clock()

    async def run_post_stop_hook(self) -> None:
        """Release the lease, then run the admin's own ``post_stop_hook``."""
        released = False
        try:
            await self.acquisition.leave_line()
            released = await self._release("stopped")
        except GPUSpawnerError as error:
            self.log.error(
                "Lease %s of %s stays until the accounting service settles it: %s",
                self.lease_id,
                self.server_ref,
                error.message,
            )
        finally:
            if not released and self.lease is not None and self.acquisition.was_begun:
                # Record that the start was aborted, and not lost with its hub.
                with suppress(GPUSpawnerError):
                    await self.services.run(self.services.leases.give_up, self.lease.id, "stopped")
            hook = super().run_post_stop_hook()
            if inspect.isawaitable(hook):
                await hook

    async def _release(self, reason: str) -> bool:
        """Release the lease if the server is proved gone. Return True if it was released."""
        await self.acquisition.written()
        if self.lease is None:
            self.lease = await self.services.run(self.services.leases.of_server, self.server_ref)
        if self.lease is None:
            return False
        self.lease_id = self.lease.id
        proof = await self.prove_gone()
        if not proof.gone:
            # The Hub considers it stopped, so nobody can reach it any more: end it.
            await self.end_leftover()
            proof = await self.prove_gone()
        if not proof.gone:
            why = f" ({proof.detail})" if proof.detail else ""
            self.log.warning("%s is not proved gone: its lease stays%s", self.server_ref, why)
            return False
        await self.services.run(
            self.services.leases.release,
            self.lease_id,
            # A busy engine may answer long after the end, but it knows when that was.
            ended_at=proof.ended_at or self.finished_at,
            stopped_at=self.stopped_at or self.seen_alive_at,
            reason=proof.detail or reason,
            # A process of an earlier hub started it, and it was never stopped.
            lost=not self.acquisition.was_begun and self.stopped_at is None,
        )
        self.lease, self.lease_id = None, ""
        self.seen_alive_at = self.finished_at = None
        self.queueing.kick()
        return True

    # Runs.

    runs_programs = False
    """True if :meth:`become_run` can start a program in the place of a server."""

    def become_run(self, run: Run) -> None:
        """Start the program of a run, with its member's settings, in the place of a server."""
        self.run = run
        self.cmd = ["python3", "-c", run_program()]

    # State and environment.

    def get_state(self) -> dict[str, Any]:
        """Add the lease's id, and what the form shows next time. The store is authoritative."""
        state: dict[str, Any] = super().get_state()
        if self.last_started:
            state["last_started"] = self.last_started
        if self.lease_id:
            state["lease_id"] = self.lease_id
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`get_state` added."""
        super().load_state(state)
        self.lease_id = state.get("lease_id", "")
        self.last_started = state.get("last_started", {})

    def get_env(self) -> dict[str, str]:
        """Return the server's environment; all GPU variables are set last, from the lease."""
        env = super().get_env()
        if self.run is not None:
            env = _without_hub(env) | run_environment(self.run, self.lease)
        if shared := _shared_device(self.lease):
            env = framework_hints(float(shared.share)) | env
        return self.with_lease_environment(env)

    def get_args(self) -> list[str]:
        """Return the server's arguments; a run has none."""
        return [] if self.run else list(super().get_args())

    def with_lease_environment(self, env: dict[str, str]) -> dict[str, str]:
        """Replace the GPU variables in ``env`` by those of the lease, and return it."""
        lease = self.lease
        devices = lease.devices if lease else ()
        env.pop("CUDA_VISIBLE_DEVICES", None)
        for name in ("GPUSPAWNER_GPU_SHARE", "GPUSPAWNER_GPU_MEMORY"):
            env.pop(name, None)
        if devices:
            env.setdefault("NVIDIA_DRIVER_CAPABILITIES", "compute,utility")
        if shared := _shared_device(lease):
            env.update(
                GPUSPAWNER_GPU_SHARE=str(float(shared.share)),
                GPUSPAWNER_GPU_MEMORY=str(shared.share_bytes),
            )
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
        """Set the spawner's traits from the chosen environment."""
        for trait in ("mem_limit", "mem_guarantee", "cpu_limit", "cpu_guarantee"):
            if (value := getattr(environment, trait)) is not None:
                setattr(self, trait, value)
        for limit, guarantee in (("mem_limit", "mem_guarantee"), ("cpu_limit", "cpu_guarantee")):
            most, kept = getattr(environment, limit), getattr(self, guarantee, None)
            # The hub's usual guarantee: engines refuse one above the limit.
            if most and isinstance(kept, (int, float)) and kept > most:
                setattr(self, guarantee, most)
        # /lab is also the default of an environment, which must not override the admin.
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


@cache
def run_program() -> str:
    """Return the program that carries out a run in its container."""
    found = importlib.resources.files("gpuspawner.runs") / "run_program.py"
    return found.read_text("utf-8")


def run_environment(run: Run, lease: Lease | None) -> dict[str, str]:
    """Return what :func:`run_program` must know."""
    seconds = lease.seconds if lease else None
    return {
        "GPUSPAWNER_RUN_ID": run.id,
        "GPUSPAWNER_RUN_WORK": json.dumps(asdict(run.work)),
        "GPUSPAWNER_RESTARTS": str(run.restarts + run.preemptions),
        "GPUSPAWNER_RUN_SECONDS": "" if seconds is None else str(seconds),
    }


def _shared_device(lease: Lease | None) -> LeasedDevice | None:
    """Return the device that a lease holds a share of; None if it holds whole ones or none."""
    devices = lease.devices if lease else ()
    return next((device for device in devices if device.is_shared), None)


def _without_hub(env: dict[str, str]) -> dict[str, str]:
    """Return the variables without those with which a server reaches the Hub."""
    prefixes = ("JUPYTERHUB_", "JPY_")
    return {name: value for name, value in env.items() if not name.startswith(prefixes)}


def kept_in(settings: MutableMapping[str, Any], key: str, make: Function[[], T]) -> T:
    """Return the object under ``key`` in ``settings``, creating it on first use."""
    if key not in settings:
        settings[key] = make()
    found: T = settings[key]
    return found
