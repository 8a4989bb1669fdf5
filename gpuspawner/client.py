"""A client of the REST API: runs, sessions, accounts and environments, in Python.

In a session, the address and the token are the session's own, which reach its member's runs and the
session itself::

    from gpuspawner.client import Client

    client = Client()
    run = client.runs.submit(["python3", "train.py"], options={"gpus": 1, "hours": 8})
    print(client.runs.wait(run.id).state)

Anywhere else, name them: ``Client("https://hub.example/services/gpu/api", token)``.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar
from urllib.parse import quote

import requests
from pydantic import TypeAdapter, ValidationError
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

__all__ = [
    *("Client", "RunCalls", "SessionCalls", "AccountCalls", "RequestRefused", "MemberDetails"),
    *("CatalogCalls", "EnvironmentDetails", "SweepCalls", "SweepDetails"),
    *("QuoteDetails", "QuotedPayer", "ExpectedStart", "SweepQuoteDetails"),
    *("ScheduleCalls", "ScheduleDetails", "ScheduledTime"),
    *("RunDetails", "Session", "SessionDevice", "SessionEnd", "Balance", "StatementLine"),
]

T = TypeVar("T")
ENDED = frozenset({"done", "failed", "stopped"})
"""States of a run that has ended."""

_READING = frozenset({"GET", "DELETE"})
"""Methods that are safe to repeat."""


class RequestRefused(Exception):
    """The hub did not do what was asked, or did not respond.

    Attributes:
        message: The hub's sentence: what is wrong, and what to do.
        reason: A short, stable word, such as ``no_credits``; ``no_answer`` without an answer.
        status: The HTTP status; 0 without an answer.
    """

    def __init__(self, message: str, reason: str, status: int) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.status = status


@dataclass(frozen=True, kw_only=True)
class RunDetails:
    """A run. Its ``state`` is waiting, starting, running, done, failed or stopped."""

    id: str
    user: str
    title: str
    state: str
    command: tuple[str, ...]
    notebook: str
    parameters: dict[str, Any]
    directory: str
    folder: str
    options: dict[str, Any]
    requeue: bool
    restarts: int
    preemptible: bool
    preemptions: int
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    reason: str
    exit_status: int | None
    lease: str | None
    charged: Decimal
    cell: int | None
    """The cell that its notebook executes; only from :meth:`RunCalls.get`."""
    cells: int | None
    sweep: str | None


@dataclass(frozen=True, kw_only=True)
class ExpectedStart:
    """When a run would probably start: in 8 of 10 cases from ``low`` to ``high``."""

    low: datetime
    likely: datetime
    high: datetime


@dataclass(frozen=True, kw_only=True)
class QuotedPayer:
    """An account that may pay for a run."""

    account: str
    available: Decimal


@dataclass(frozen=True, kw_only=True)
class QuoteDetails:
    """What a run would cost, when it would start, and what its member may choose.

    The prices are in words, as the form shows them. ``refusal`` says why it would be refused;
    empty if it would not. ``place`` is its position in the queue, if it would wait.
    """

    options: dict[str, Any]
    environment: str
    environment_name: str
    gpus: int
    most_gpus: int
    share: str
    """What a share of a GPU is here; empty if none can be asked for."""
    cpu_variant: bool
    models: tuple[str, ...]
    hours: float | None
    most_hours: float | None
    account: str
    accounts: tuple[QuotedPayer, ...]
    what: str
    price: str
    total: str
    lasts: str
    refusal: str
    preemptible: bool
    preemptible_share: float | None
    """The price of a preemptible run as a share of the usual price; None without such runs."""
    at_once: bool
    place: int | None
    estimate: ExpectedStart | None
    planned: datetime | None
    latest: datetime | None


@dataclass(frozen=True, kw_only=True)
class SweepQuoteDetails:
    """The most that a sweep can cost, and the credits needed for the runs that start at once."""

    runs: int
    seconds: int | None
    """The time limit of each run."""
    rate_per_hour: Decimal
    """The rate of one run, on the most expensive GPUs that fit."""
    most: Decimal | None
    """The price of all runs, if each lasts until its time limit."""
    hold: Decimal


@dataclass(frozen=True, kw_only=True)
class SweepDetails:
    """A sweep: its runs in order, how many are in each state, and their cost so far."""

    id: str
    user: str
    at_most: int | None
    created_at: datetime
    states: dict[str, int]
    charged: Decimal
    runs: tuple[RunDetails, ...]


@dataclass(frozen=True, kw_only=True)
class ScheduledTime:
    """A time of a schedule: the id of its run, or the reason why none was submitted."""

    due_at: datetime
    run: str | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class ScheduleDetails:
    """A schedule of runs, with its latest times, newest first."""

    id: str
    user: str
    title: str
    cron: str
    zone: str
    paused: bool
    next_at: datetime | None
    refusal: str
    """Why its latest run was refused; empty if it was accepted."""
    command: tuple[str, ...]
    notebook: str
    parameters: dict[str, Any]
    directory: str
    options: dict[str, Any]
    requeue: bool
    preemptible: bool
    created_at: datetime
    times: tuple[ScheduledTime, ...]


@dataclass(frozen=True, kw_only=True)
class _Schedules:
    schedules: tuple[ScheduleDetails, ...]


@dataclass(frozen=True, kw_only=True)
class SessionDevice:
    """A GPU of a session."""

    uuid: str
    index: int
    model: str
    memory_bytes: int
    slots: int
    """How many slots the GPU has: 1 if it is not shared."""
    held_slots: int
    """How many of them the session holds."""
    part: str
    """How much of a GPU it is: 1, or such as 1/7 for a MIG instance."""


@dataclass(frozen=True, kw_only=True)
class SessionEnd:
    """When and why a running session ends by itself."""

    at: datetime
    reason: str


@dataclass(frozen=True, kw_only=True)
class ResourceUse:
    """What a session or run used of CPU, memory, disk and network; None if never reported."""

    cpu_seconds: float | None
    memory_bytes: int | None
    """When last measured."""
    memory_peak_bytes: int | None
    memory_limit_bytes: int | None
    """The memory of the machine if the environment sets no limit."""
    disk_read_bytes: int | None
    disk_written_bytes: int | None
    network_received_bytes: int | None
    network_sent_bytes: int | None
    memory_kills: int
    """How often the system ended a program because memory was used up."""
    sampled_at: datetime | None


@dataclass(frozen=True, kw_only=True)
class Session:
    """A session, or the lease of a run, and what it cost so far."""

    id: str
    user: str
    server: str
    account: str
    environment: str
    state: str
    devices: tuple[SessionDevice, ...]
    rate_per_hour: Decimal
    cost: Decimal
    granted_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    end_reason: str
    warned_at: datetime | None
    stops_at: datetime | None
    ends_at: datetime | None
    end: SessionEnd | None
    claim_by: datetime | None
    group: str
    outcome: str
    charged: Decimal
    refunded: Decimal
    waived: Decimal
    usage: ResourceUse | None
    """None if it was never measured."""


@dataclass(frozen=True, kw_only=True)
class Balance:
    """The credits of an account, and how long they last at its present rate."""

    account: str
    balance: Decimal
    held: Decimal
    available: Decimal
    rate_per_hour: Decimal
    lasts_seconds: int | None
    runs_dry_at: datetime | None


@dataclass(frozen=True, kw_only=True)
class StatementLine:
    """A line of a statement."""

    id: int
    transfer: str
    at: datetime
    kind: str
    actor: str
    reason: str
    amount: Decimal
    balance: Decimal
    lease: str | None


@dataclass(frozen=True, kw_only=True)
class MemberDetails:
    """The token's member, with their account, servers and newest statement lines."""

    name: str
    admin: bool
    as_of: datetime
    account: Balance
    running: tuple[Session, ...]
    statement: tuple[StatementLine, ...]


@dataclass(frozen=True, kw_only=True)
class EnvironmentDetails:
    """An environment, and what may be asked for with it."""

    environment: str
    name: str
    summary: str
    default: bool
    frameworks: dict[str, str]
    default_gpus: int
    max_gpus: int
    cpu_variant: bool
    sharing: str
    """Whether its servers get ``whole`` GPUs, a share of one (``slot``), or ``any``."""
    models: tuple[str, ...]
    default_hours: float | None
    max_hours: float | None


@dataclass(frozen=True, kw_only=True)
class _Environments:
    environments: tuple[EnvironmentDetails, ...]


class _Page(Protocol):
    @property
    def next(self) -> str | int | None:
        """The cursor of the next page; None on the last page."""


P = TypeVar("P", bound=_Page)


@dataclass(frozen=True, kw_only=True)
class _RunPage:
    runs: tuple[RunDetails, ...]
    next: str | None


@dataclass(frozen=True, kw_only=True)
class _SessionPage:
    leases: tuple[Session, ...]
    next: str | None


@dataclass(frozen=True, kw_only=True)
class _AccountPage:
    accounts: tuple[Balance, ...]
    next: str | None


@dataclass(frozen=True, kw_only=True)
class _StatementPage:
    entries: tuple[StatementLine, ...]
    next: int | None


@dataclass(frozen=True)
class Call(Generic[T]):
    """An operation of the REST API, named as in its OpenAPI document."""

    name: str
    method: str
    path: str
    answer: type[T]
    query: tuple[str, ...] = ()

    @cached_property
    def adapter(self) -> TypeAdapter[T]:
        """The parser of the answer, which ignores the fields of a newer hub."""
        return TypeAdapter(self.answer)


ME = Call("me", "GET", "me", MemberDetails)
RUNS = Call("runs", "GET", "runs", _RunPage, ("all", "before", "limit"))
SUBMIT_RUN = Call("submitRun", "POST", "runs", RunDetails)
RUN = Call("run", "GET", "runs/{run}", RunDetails)
STOP_RUN = Call("stopRun", "DELETE", "runs/{run}", RunDetails)
QUOTE_RUN = Call("quoteRun", "POST", "runs/-/quote", QuoteDetails)
QUOTE_SWEEP = Call("quoteSweep", "POST", "sweeps/-/quote", SweepQuoteDetails)
SUBMIT_SWEEP = Call("submitSweep", "POST", "sweeps", SweepDetails)
SWEEP = Call("sweep", "GET", "sweeps/{sweep}", SweepDetails)
STOP_SWEEP = Call("stopSweep", "DELETE", "sweeps/{sweep}", SweepDetails)
AGAIN_SWEEP = Call("againSweep", "POST", "sweeps/{sweep}/again", SweepDetails)
SCHEDULES = Call("schedules", "GET", "runs/-/schedules", _Schedules, ("all",))
CREATE_SCHEDULE = Call("createSchedule", "POST", "runs/-/schedules", ScheduleDetails)
SCHEDULE = Call("schedule", "GET", "runs/-/schedules/{schedule}", ScheduleDetails)
CHANGE_SCHEDULE = Call("changeSchedule", "PATCH", "runs/-/schedules/{schedule}", ScheduleDetails)
DELETE_SCHEDULE = Call("deleteSchedule", "DELETE", "runs/-/schedules/{schedule}", ScheduleDetails)
RUN_SCHEDULE = Call("runSchedule", "POST", "runs/-/schedules/{schedule}/run", RunDetails)
SESSIONS = Call("leases", "GET", "leases", _SessionPage, ("all", "before", "limit"))
EXTEND = Call("extend", "POST", "leases/{lease}/extend", Session)
END = Call("end", "POST", "leases/{lease}/end", Session)
ACCOUNTS = Call("accounts", "GET", "accounts", _AccountPage, ("search", "after", "limit"))
ACCOUNT = Call("account", "GET", "accounts/{account}", Balance)
STATEMENT = Call(
    "statement", "GET", "accounts/{account}/statement", _StatementPage, ("before", "limit")
)
ENVIRONMENTS = Call("environments", "GET", "environments", _Environments)
CALLS: tuple[Call[Any], ...] = (
    *(QUOTE_RUN, QUOTE_SWEEP),
    *(ENVIRONMENTS, SUBMIT_SWEEP, SWEEP, STOP_SWEEP, AGAIN_SWEEP),
    *(SCHEDULES, CREATE_SCHEDULE, SCHEDULE, CHANGE_SCHEDULE, DELETE_SCHEDULE, RUN_SCHEDULE),
    *(ME, RUNS, SUBMIT_RUN, RUN, STOP_RUN, SESSIONS, EXTEND, END),
    *(ACCOUNTS, ACCOUNT, STATEMENT),
)
"""Every operation that the client knows."""


class Client:
    """A hub, as the member whose token it is.

    Requests that are safe to repeat are retried if the hub does not respond.

    Args:
        address: The address of the REST API: ``https://hub.example/services/gpu/api``. In a
            session, the default is that of its hub (``JUPYTERHUB_API_URL``).
        token: The member's token. In a session, the default is its own
            (``JUPYTERHUB_API_TOKEN``).
        timeout: Seconds to wait for each answer.

    Raises:
        ValueError: The address or the token is missing, and this is not a session.
    """

    def __init__(
        self, address: str | None = None, token: str | None = None, *, timeout: float = 30.0
    ) -> None:
        hub = os.environ.get("JUPYTERHUB_API_URL", "").rstrip("/")
        token = token or os.environ.get("JUPYTERHUB_API_TOKEN", "")
        if not token or not (address or hub):
            raise ValueError("name the hub's address and a token: this is not a session of a hub")
        self.address = (address or f"{hub}/gpuspawner").rstrip("/")
        self.timeout = timeout
        self._session = requests.Session()
        # Unlike a header, this is not replaced by what a file .netrc says of the hub.
        self._session.auth = lambda request: _with_token(request, token)
        again = Retry(
            total=4,
            read=1,
            backoff_factor=0.5,
            status_forcelist=(502, 503, 504),
            allowed_methods=_READING,
            raise_on_status=False,
        )
        self._session.mount(self.address, HTTPAdapter(max_retries=again))
        with_key = again.new(allowed_methods=_READING | {"POST", "PATCH"})
        for path in ("runs", "sweeps"):
            self._session.mount(f"{self.address}/{path}", HTTPAdapter(max_retries=with_key))
        if key := os.environ.get("JUPYTERHUB_SSL_KEYFILE"):  # the hub uses certificates of its own
            self._session.cert = (os.environ["JUPYTERHUB_SSL_CERTFILE"], key)
            self._session.verify = os.environ["JUPYTERHUB_SSL_CLIENT_CA"]
        self.runs = RunCalls(self)
        self.sweeps = SweepCalls(self)
        self.schedules = ScheduleCalls(self)
        self.sessions = SessionCalls(self)
        self.accounts = AccountCalls(self)
        self.catalog = CatalogCalls(self)

    def me(self) -> MemberDetails:
        """Return the token's member, with their account, servers and newest statement lines."""
        return self.ask(ME)

    def ask(
        self,
        call: Call[T],
        *path: str,
        query: Mapping[str, str | int] | None = None,
        body: Mapping[str, object] | None = None,
    ) -> T:
        """Call an operation, with the parameters of its path. Raises RequestRefused."""
        names = [part for part in call.path.split("/") if part.startswith("{")]
        address = call.path
        for name, value in zip(names, path, strict=True):
            address = address.replace(name, quote(value, safe=""))
        try:
            answer = self._session.request(
                call.method,
                f"{self.address}/{address}",
                params=query,
                json=body if body is not None or call.method != "POST" else {},
                timeout=self.timeout,
                # Named here, it is not replaced by REQUESTS_CA_BUNDLE.
                verify=self._session.verify,
                allow_redirects=False,
            )
        except requests.RequestException as error:
            message = f"The hub at {self.address} does not respond; try again in a moment."
            raise RequestRefused(message, "no_answer", 0) from error
        if answer.status_code >= 300:
            raise _refusal(answer)
        try:
            return call.adapter.validate_json(answer.content)
        except ValidationError as error:
            message = f"{self.address} did not answer as a gpuspawner of this version does: {error}"
            raise RequestRefused(message, "unknown_answer", answer.status_code) from error

    def pages(self, call: Call[P], *path: str, **query: str | int) -> Iterator[P]:
        """Yield each page of a list. Raises RequestRefused."""
        (cursor,) = {"after", "before"}.intersection(call.query)
        while True:
            page = self.ask(call, *path, query=query)
            yield page
            if page.next is None:
                return
            query[cursor] = page.next


class RunCalls:
    """The member's runs: ``client.runs``."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def submit(
        self,
        command: Sequence[str] = (),
        *,
        notebook: str = "",
        parameters: Mapping[str, object] | None = None,
        directory: str = "",
        title: str = "",
        options: Mapping[str, object] | None = None,
        requeue: bool = False,
        preemptible: bool = False,
        key: str = "",
    ) -> RunDetails:
        """Submit a command or a notebook. It waits for its GPUs, and needs no session.

        Args:
            command: The program and its arguments.
            notebook: A notebook's path in the workspace, instead of a command.
            parameters: The notebook's parameters, by name.
            directory: The working directory, relative to the workspace.
            title: Its title in lists; by default, the program or the notebook.
            options: What it needs, as for the start of a server: ``environment``, ``gpus``,
                ``gpu_model``, ``gpu_memory``, ``hours``, ``account`` and so on.
            requeue: Begin again if the hub interrupts it, at most three times.
            preemptible: Run for less, on GPUs that nobody else can use, and yield them to others.
            key: An idempotency key. Submitting again with it returns the first run. By default, a
                new one for each call.

        Returns:
            The run, or the earlier one with the same key.

        Raises:
            RequestRefused: It cannot be started as asked, or the hub does not respond.
        """
        body = _submission(
            command,
            parameters,
            options,
            key,
            notebook=notebook,
            directory=directory,
            title=title,
            requeue=requeue,
            preemptible=preemptible,
        )
        return self._client.ask(SUBMIT_RUN, body=body)

    def quote(
        self,
        *,
        options: Mapping[str, object] | None = None,
        lease: str = "",
        preemptible: bool = False,
    ) -> QuoteDetails:
        """Return what a run would cost and when it would start; nothing is submitted.

        Args:
            options: What it needs, as for :meth:`submit`.
            lease: A session of the member, whose options apply where ``options`` has none.
            preemptible: As for :meth:`submit`.

        Raises:
            RequestRefused: No run can be submitted with these options.
        """
        body = {"options": dict(options or {}), "lease": lease, "preemptible": preemptible}
        return self._client.ask(QUOTE_RUN, body=body)

    def get(self, run: str) -> RunDetails:
        """Return the run with this id. Raises RequestRefused."""
        return self._client.ask(RUN, run)

    def list(self, *, everybody: bool = False, page: int = 50) -> Iterator[RunDetails]:
        """Yield runs, newest first. Raises RequestRefused.

        Args:
            everybody: Those of all members, for admins.
            page: How many are asked for at once.
        """
        for found in self._client.pages(RUNS, all=int(everybody), limit=page):
            yield from found.runs

    def stop(self, run: str) -> RunDetails:
        """Stop a run, waiting or running; what it has written stays. Raises RequestRefused."""
        return self._client.ask(STOP_RUN, run)

    def wait(self, run: str, *, timeout: float | None = None, every: float = 2.0) -> RunDetails:
        """Wait until a run has ended. A hub that is away for a moment does not end the wait.

        Args:
            run: Its id.
            timeout: Seconds until TimeoutError is raised; None waits for as long as it takes.
            every: Seconds between two requests.

        Raises:
            RequestRefused: The hub does not know the run, or refuses the token.
            TimeoutError: It has not ended in time.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                found = self.get(run)
            except RequestRefused as error:
                if error.status and error.status < 500:
                    raise
            else:
                if found.state in ENDED:
                    return found
            if deadline is not None and time.monotonic() + every > deadline:
                raise TimeoutError(f"The run {run} has not ended in {timeout:g} s.")
            time.sleep(every)


class SweepCalls:
    """The member's sweeps, runs with many parameters: ``client.sweeps``."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def submit(
        self,
        command: Sequence[str] = (),
        *,
        sets: Sequence[Mapping[str, object]],
        notebook: str = "",
        parameters: Mapping[str, object] | None = None,
        directory: str = "",
        title: str = "",
        options: Mapping[str, object] | None = None,
        requeue: bool = False,
        preemptible: bool = False,
        at_most: int | None = None,
        key: str = "",
    ) -> SweepDetails:
        """Submit a run for each set of parameters, all of them or none. Raises RequestRefused.

        Args:
            command: The program and its arguments, with parameters' names in braces: ``{lr}``.
            sets: The parameters of each run.
            notebook: A notebook's path in the workspace, instead of a command.
            parameters: Parameters that all runs have.
            directory: The working directory, relative to the workspace.
            title: Their title in lists, before their parameters.
            options: What each needs, as for the start of a server.
            requeue: Begin a run again if the hub interrupts it, at most three times.
            preemptible: Run for less, on GPUs that nobody else can use, and yield them to others.
            at_most: How many may wait in the queue or run at once. By default all.
            key: An idempotency key, as for a run.
        """
        body = _submission(
            command,
            parameters,
            options,
            key,
            sets=[dict(each) for each in sets],
            notebook=notebook,
            directory=directory,
            title=title,
            requeue=requeue,
            preemptible=preemptible,
            at_most=at_most,
        )
        return self._client.ask(SUBMIT_SWEEP, body=body)

    def quote(
        self,
        command: Sequence[str] = (),
        *,
        sets: Sequence[Mapping[str, object]],
        notebook: str = "",
        options: Mapping[str, object] | None = None,
        preemptible: bool = False,
        at_most: int | None = None,
    ) -> SweepQuoteDetails:
        """Return the most that a sweep can cost; nothing is submitted.

        The arguments are those of :meth:`submit` that affect the price. Raises RequestRefused if
        the sweep cannot be submitted.
        """
        body = {
            "command": list(command),
            "sets": [dict(each) for each in sets],
            "notebook": notebook,
            "options": dict(options or {}),
            "preemptible": preemptible,
            "at_most": at_most,
        }
        return self._client.ask(QUOTE_SWEEP, body=body)

    def get(self, sweep: str) -> SweepDetails:
        """Return the sweep with this id. Raises RequestRefused."""
        return self._client.ask(SWEEP, sweep)

    def stop(self, sweep: str) -> SweepDetails:
        """Stop all runs of a sweep; what they have written stays. Raises RequestRefused."""
        return self._client.ask(STOP_SWEEP, sweep)

    def again(self, sweep: str, *, key: str = "") -> SweepDetails:
        """Submit the failed runs of a sweep again, as a new one. Raises RequestRefused."""
        return self._client.ask(AGAIN_SWEEP, sweep, body={"key": key or uuid.uuid4().hex})


class ScheduleCalls:
    """The member's schedules of runs: ``client.schedules``."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def create(
        self,
        cron: str,
        command: Sequence[str] = (),
        *,
        zone: str = "UTC",
        notebook: str = "",
        parameters: Mapping[str, object] | None = None,
        directory: str = "",
        title: str = "",
        options: Mapping[str, object] | None = None,
        requeue: bool = False,
        preemptible: bool = False,
        paused: bool = False,
        key: str = "",
    ) -> ScheduleDetails:
        """Create a schedule, which submits a run at each of its times. It needs no session.

        Args:
            cron: Minute, hour, day of the month, month and day of the week: ``30 7 * * 1-5``.
            command: As for :meth:`RunCalls.submit`, like the arguments that refer to it.
            zone: The time zone of the times, such as ``Europe/Vienna``.
            notebook: See ``command``. Each run executes the notebook as it is at that time.
            parameters: See ``command``.
            directory: See ``command``.
            title: See ``command``.
            options: See ``command``.
            requeue: See ``command``.
            preemptible: See ``command``.
            paused: Create it paused: it submits no runs until it is resumed.
            key: An idempotency key. By default, a new one for each call.

        Returns:
            The schedule, or the earlier one with the same key.

        Raises:
            RequestRefused: Its runs could not be started as asked, or the hub does not respond.
        """
        body = _submission(
            command,
            parameters,
            options,
            key,
            cron=cron,
            zone=zone,
            notebook=notebook,
            directory=directory,
            title=title,
            requeue=requeue,
            preemptible=preemptible,
            paused=paused,
        )
        return self._client.ask(CREATE_SCHEDULE, body=body)

    def get(self, schedule: str) -> ScheduleDetails:
        """Return the schedule with this id. Raises RequestRefused."""
        return self._client.ask(SCHEDULE, schedule)

    def list(self, *, everybody: bool = False) -> Sequence[ScheduleDetails]:
        """Return schedules, newest first. Raises RequestRefused.

        Args:
            everybody: Those of all members, for admins.
        """
        return self._client.ask(SCHEDULES, query={"all": int(everybody)}).schedules

    def change(self, schedule: str, **fields: object) -> ScheduleDetails:
        """Change a schedule. Raises RequestRefused.

        Args:
            schedule: Its id.
            fields: The fields to change: ``title``, ``cron``, ``zone``, ``parameters``,
                ``options`` or ``paused``.
        """
        return self._client.ask(CHANGE_SCHEDULE, schedule, body=fields)

    def pause(self, schedule: str) -> ScheduleDetails:
        """Pause a schedule: it submits no runs. Raises RequestRefused."""
        return self.change(schedule, paused=True)

    def resume(self, schedule: str) -> ScheduleDetails:
        """Resume a schedule from its next time on. Raises RequestRefused."""
        return self.change(schedule, paused=False)

    def run_now(self, schedule: str, *, key: str = "") -> RunDetails:
        """Submit a run of a schedule now. Raises RequestRefused.

        Args:
            schedule: Its id.
            key: An idempotency key. By default, a new one for each call.
        """
        return self._client.ask(RUN_SCHEDULE, schedule, body={"key": key or uuid.uuid4().hex})

    def delete(self, schedule: str) -> ScheduleDetails:
        """Delete a schedule, and return it as it was; its runs stay. Raises RequestRefused."""
        return self._client.ask(DELETE_SCHEDULE, schedule)


class SessionCalls:
    """The member's sessions: ``client.sessions``. JupyterHub's own REST API starts servers."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def list(self, *, everybody: bool = False, page: int = 50) -> Iterator[Session]:
        """Yield sessions and the leases of runs, newest first. Raises RequestRefused.

        Args:
            everybody: Those of all members, for admins.
            page: How many are asked for at once.
        """
        for found in self._client.pages(SESSIONS, all=int(everybody), limit=page):
            yield from found.leases

    def extend(self, session: str) -> Session:
        """Extend a session that has a time limit. Raises RequestRefused if somebody waits."""
        return self._client.ask(EXTEND, session)

    def end(self, session: str) -> Session:
        """Stop a session's server. Raises RequestRefused."""
        return self._client.ask(END, session)


class AccountCalls:
    """Accounts, ``member:NAME`` or ``group:NAME``: ``client.accounts``."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def get(self, account: str) -> Balance:
        """Return an account's credits. Raises RequestRefused."""
        return self._client.ask(ACCOUNT, account)

    def list(self, *, search: str = "", page: int = 50) -> Iterator[Balance]:
        """Yield the accounts that the token may read, by name. Raises RequestRefused.

        Args:
            search: Text in their names.
            page: How many are asked for at once.
        """
        for found in self._client.pages(ACCOUNTS, search=search, limit=page):
            yield from found.accounts

    def statement(self, account: str, *, page: int = 50) -> Iterator[StatementLine]:
        """Yield the lines of an account's statement, newest first. Raises RequestRefused."""
        for found in self._client.pages(STATEMENT, account, limit=page):
            yield from found.entries


class CatalogCalls:
    """The catalog: ``client.catalog``."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def environments(self) -> tuple[EnvironmentDetails, ...]:
        """Return the environments that the member may choose. Raises RequestRefused."""
        return self._client.ask(ENVIRONMENTS).environments


def _submission(
    command: Sequence[str],
    parameters: Mapping[str, object] | None,
    options: Mapping[str, object] | None,
    key: str,
    **fields: object,
) -> dict[str, object]:
    """Return the body that submits a run, a sweep or a schedule, with a new key by default."""
    return {
        "command": list(command),
        "parameters": dict(parameters or {}),
        "options": dict(options or {}),
        "key": key or uuid.uuid4().hex,
        **fields,
    }


def _with_token(request: requests.PreparedRequest, token: str) -> requests.PreparedRequest:
    request.headers["Authorization"] = f"token {token}"
    return request


def _refusal(answer: requests.Response) -> RequestRefused:
    """Return the hub's refusal; that of a proxy or of JupyterHub itself may lack a sentence."""
    try:
        told = answer.json()
        message, reason = str(told["message"]), str(told.get("error", ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        message, reason = f"The hub answered with status {answer.status_code}.", ""
    return RequestRefused(message, reason or f"http_{answer.status_code}", answer.status_code)
