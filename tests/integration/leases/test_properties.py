"""Whatever happens in whatever order. Real: the services on SQLite and PostgreSQL; simulated: the
clock, the devices, and what an engine and a Hub would say."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from gpuspawner.core.errors import NoCredits, NoDeviceFree, ServerHasLease
from gpuspawner.core.units import MICRO
from gpuspawner.leases.models import LeaseState, ServerRef, Sighting
from gpuspawner.leases.reconciliation import HubState, Remove
from gpuspawner.ledger.models import member_account
from gpuspawner.services import Services
from tests.support.brokers import Clock, acquire, fleet, open_services, problems
from tests.support.machines import run_machine
from tests.support.postgres import PrivatePostgres
from tests.support.tier import SOAK

MEMBERS = ("anna", "bert", "cara")
GRACE = 60
OPENING = 20 * MICRO
RATES = {"*": "3.333333"}


@dataclass
class Server:
    """What really became of a server, whatever the store believes."""

    lease_id: str
    ref: ServerRef
    rate: int
    granted_at: datetime
    created_at: datetime | None = None
    started_at: datetime | None = None
    """When the services were told that it answers."""
    ended_at: datetime | None = None
    listed: bool = True
    """False when its container is removed: the engine says 404."""
    hub: HubState | None = HubState.PENDING
    failed: bool = False
    settled_at: datetime | None = None
    """Up to when its lease must have been charged, once that has ended."""

    @property
    def alive(self) -> bool:
        return self.created_at is not None and self.ended_at is None


def some(which: Callable[[Server], bool]) -> Callable[[BrokerMachine], bool]:
    """Whether there is such a server: what cannot happen is not tried."""
    return lambda machine: any(map(which, machine.open.values()))


def to_be_created(server: Server) -> bool:
    return server.created_at is None and server.hub is not None


def to_answer(server: Server) -> bool:
    return server.alive and server.hub is HubState.PENDING


def lives(server: Server) -> bool:
    return server.alive


def is_gone(server: Server) -> bool:
    return not server.alive


def is_known(server: Server) -> bool:
    return server.hub is not None


class BrokerMachine(RuleBasedStateMachine):
    """Members, servers, an engine, a Hub and devices, each doing what it likes."""

    def __init__(self, new_url: Callable[[], str]) -> None:
        super().__init__()
        self.url = new_url()
        self.clock = Clock()
        self.open: dict[str, Server] = {}
        self.ended: dict[str, Server] = {}
        self.given: dict[str, int] = {}
        self.keys = itertools.count()
        self.uuids: list[str] = []
        self.unfit: set[str] = set()
        self.driver_lost = False
        self.over = False
        self.services = self.new_services()

    def new_services(self) -> Services:
        return open_services(
            self.url, self.clock, gpu_rates=RATES, opening_grant=20, refresh_seconds=0
        )

    def drawn(self, data: st.DataObject, among: Callable[[Server], bool]) -> Server:
        return data.draw(st.sampled_from([s for s in self.open.values() if among(s)]))

    @initialize()
    def members_sign_in(self) -> None:
        self.uuids = [view.device.uuid for view in self.services.monitoring.overview().devices]
        assert len(self.free()) == 4
        for name in MEMBERS:
            self.services.ledger.open_account(name)
            self.given[name] = OPENING

    # Time, processes, devices.

    @rule(seconds=st.integers(0, 90) | st.integers(0, 20_000), micros=st.integers(0, 999_999))
    def time_goes_on(self, seconds: int, micros: int) -> None:
        self.clock.forward(seconds=seconds, microseconds=micros)

    @rule()
    def the_hub_starts_anew(self) -> None:
        source = fleet(self.services)
        self.services = self.new_services()
        self.services.watch.source = source  # the machine has the same devices as before

    @rule(
        number=st.integers(0, 3),
        what=st.sampled_from(["fail", "occupy", "restore", "lose", "restore all"]),
    )
    def a_device_changes(self, number: int, what: str) -> None:
        source, uuid = fleet(self.services), self.uuids[number]
        if what == "fail":
            source.fail(uuid)
            self.unfit.add(uuid)
        elif what == "occupy":
            source.occupy(uuid, pid=4711)
            self.unfit.add(uuid)
        elif what == "restore":
            source.restore(uuid)
            self.unfit.discard(uuid)
        elif what == "lose":
            source.lose()
            self.driver_lost = True
        else:
            source.restore()
            self.unfit, self.driver_lost = set(), False

    def free(self) -> set[str]:
        """The devices that may be leased now, as they really are."""
        leased = {uuid for lease in self.services.leases.open_leases() for uuid in lease.uuids}
        return set() if self.driver_lost else set(self.uuids) - self.unfit - leased

    # One life of a server.

    @rule(
        user=st.sampled_from(MEMBERS),
        name=st.sampled_from(["", "lab"]),
        count=st.integers(0, 3),
        answers=st.booleans(),
    )
    def a_server_is_asked_for(self, user: str, name: str, count: int, answers: bool) -> None:
        ref = ServerRef(user, name)
        before = self.services.leases.open_leases()
        free = self.free()
        shown = {
            v.device.uuid for v in self.services.monitoring.overview().devices if v.state == "free"
        }
        assert shown == free
        try:
            lease = acquire(self.services, user, count, name)
        except ServerHasLease:
            assert ref in {server.ref for server in self.open.values()}
        except NoDeviceFree as error:
            assert len(free) < count
            assert error.message.startswith(("No ", "All ", "The only ", "You asked for "))
        except NoCredits:
            account = self.services.ledger.member(user)
            assert account.available < -(-3_333_333 * count // 6)
        else:
            assert ref not in {server.ref for server in self.open.values()}
            assert len(lease.uuids) == count and free.issuperset(lease.uuids)
            assert lease.rate == 3_333_333 * count
            server = Server(lease.id, ref, lease.rate, self.clock.now)
            self.open[lease.id] = server
            if answers:  # at once; else step by step, as below
                server.created_at, server.hub = self.clock.now, HubState.READY
                self.confirm(server)
            return
        assert self.services.leases.open_leases() == before, "a refusal writes nothing"

    @precondition(some(to_be_created))
    @rule(data=st.data())
    def its_container_is_created(self, data: st.DataObject) -> None:
        self.drawn(data, to_be_created).created_at = self.clock.now

    @precondition(some(to_answer))
    @rule(data=st.data(), written_down=st.booleans())
    def it_answers(self, data: st.DataObject, written_down: bool) -> None:
        """The hub may be killed before it writes that down."""
        server = self.drawn(data, to_answer)
        server.hub = HubState.READY
        if written_down:
            self.confirm(server)

    def confirm(self, server: Server) -> None:
        self.services.leases.confirm(server.lease_id, f"container-{server.lease_id}")
        server.started_at = server.started_at or self.clock.now

    @precondition(some(lives))
    @rule(data=st.data(), removed=st.booleans())
    def it_dies(self, data: st.DataObject, removed: bool) -> None:
        server = self.drawn(data, lives)
        server.ended_at, server.listed = self.clock.now, not removed

    @precondition(some(is_gone))
    @rule(data=st.data(), known=st.booleans(), failed=st.booleans())
    def the_hub_releases_it(self, data: st.DataObject, known: bool, failed: bool) -> None:
        """Its spawner has the proof that it is gone, and maybe when that happened."""
        server = self.drawn(data, is_gone)
        lease = self.services.leases.get(server.lease_id)
        end = server.ended_at if known else None
        server.failed = failed
        ended = self.services.leases.release(lease.id, ended_at=end, reason="gone", failed=failed)
        self.has_ended(server, end or lease.seen_at or lease.started_at or lease.granted_at)
        again = self.services.leases.release(lease.id, ended_at=self.clock.now, reason="again")
        assert again == self.services.leases.confirm(lease.id) == ended

    @precondition(some(is_known))
    @rule(data=st.data())
    def the_hub_forgets_it(self, data: st.DataObject) -> None:
        self.drawn(data, is_known).hub = None

    def has_ended(self, server: Server, at: datetime) -> None:
        server.settled_at = max(at, server.started_at or server.granted_at)
        server.hub = None
        self.ended[server.lease_id] = self.open.pop(server.lease_id)

    # Credits.

    @rule(user=st.sampled_from(MEMBERS), amount=st.integers(-30 * MICRO, 90 * MICRO).filter(bool))
    def credits_are_given(self, user: str, amount: int) -> None:
        key, account = f"gift-{next(self.keys)}", member_account(user)
        assert self.services.ledger.grant(account, amount, actor="admin", reason="gift", key=key)
        assert not self.services.ledger.grant(
            account, amount, actor="admin", reason="gift", key=key
        )
        self.given[user] += amount

    @rule()
    def everybody_is_charged(self) -> None:
        self.services.ledger.charge_all()
        assert self.services.ledger.charge_all() == 0, "a doubled tick charges nothing"
        for server in self.open.values():
            assert self.services.leases.get(server.lease_id).charged == owed(server, self.clock.now)

    # The comparison of store, engine and Hub.

    @rule(engine=st.booleans(), hub=st.booleans())
    def what_runs_is_compared(self, engine: bool, hub: bool) -> None:
        before = {lease.id: lease for lease in self.services.leases.open_leases()}
        servers = {s.ref: s.hub for s in self.open.values() if s.hub} if hub else None
        sightings = self.sightings() if engine else None
        actions = self.services.leases.reconcile(
            {"docker": sightings}, servers, grace_seconds=GRACE
        )
        now = self.clock.now
        for server in list(self.open.values()):
            lease = self.services.leases.get(server.lease_id)
            if lease.state is LeaseState.ENDED:
                assert engine and not server.alive, "only an engine proves an end"
                was = before[lease.id]
                self.has_ended(server, self.proven_end(server) or was.seen_at or was.granted_at)
            elif engine and not server.alive and server.started_at:
                # Its container is no more, but the Hub has it still, and knows when it ended.
                fresh = now - (lease.seen_at or lease.granted_at) < timedelta(seconds=GRACE)
                hub_says = hub and server.hub and not server.listed and fresh
                assert hub_says, f"{server} is gone and keeps its lease"
            elif server.alive and engine and hub and server.hub is HubState.READY:
                server.started_at = server.started_at or now
                assert lease.state is LeaseState.RUNNING, "what lives is adopted"
        for action in actions:
            if isinstance(action, Remove):
                doomed = {**self.open, **self.ended}[action.sighting.lease_id]
                assert doomed.alive and doomed.hub is None
                doomed.ended_at = now

    def sightings(self) -> list[Sighting]:
        return [
            Sighting(
                lease_id=server.lease_id,
                ref=f"container-{server.lease_id}",
                server=server.ref,
                alive=server.alive,
                created_at=server.created_at,
                ended_at=server.ended_at,
            )
            for server in self.open.values()
            if server.created_at and server.listed
        ]

    def proven_end(self, server: Server) -> datetime | None:
        return server.ended_at if server.created_at and server.listed else None

    # What must hold after every step.

    @invariant()
    def all_is_well(self) -> None:
        failed = {server.lease_id for server in self.ended.values() if server.failed}
        assert problems(self.services.store, failed, chains=self.over) == []
        open_leases = self.services.leases.open_leases()
        assert {lease.id for lease in open_leases} == set(self.open)
        places = [uuid for lease in open_leases for uuid in lease.uuids]
        assert len(places) == len(set(places)), "no device is leased twice"
        for account in self.services.ledger.accounts():
            mine = [lease for lease in open_leases if lease.account == account.name]
            assert account.held == sum(max(0, lease.hold - lease.charged) for lease in mine)

    def teardown(self) -> None:
        """Everybody stops: what was charged is what was owed, whenever the ticks came."""
        try:
            for server in list(self.open.values()):
                end = server.ended_at or self.clock.now
                self.services.leases.release(
                    server.lease_id, ended_at=end, reason="the day is over"
                )
                self.has_ended(server, end)
            spent: dict[str, int] = dict.fromkeys(MEMBERS, 0)
            for server in self.ended.values():
                assert server.settled_at
                due = 0 if server.failed else owed(server, server.settled_at)
                assert self.services.leases.get(server.lease_id).charged == due
                spent[server.ref.user] += due
            for user, given in self.given.items():
                assert self.services.ledger.member(user).balance == given - spent[user]
                assert self.services.ledger.member(user).held == 0
            self.over = True
            self.all_is_well()
        finally:
            self.services.store.close()


def owed(server: Server, until: datetime) -> int:
    """Rate times time, rounded down; computed apart from the ledger's own rules."""
    if server.started_at is None:
        return 0
    elapsed = max(timedelta(0), until - server.started_at)
    micros = (elapsed.days * 86_400 + elapsed.seconds) * 10**6 + elapsed.microseconds
    return server.rate * micros // (3600 * 10**6)


@pytest.mark.usefixtures("processes")
def test_lease_invariants_hold_in_any_order_on_sqlite(new_file: Callable[[], str]) -> None:
    examples, steps = (500, 50) if SOAK else (25, 30)
    run_machine(lambda: BrokerMachine(new_file), examples, steps)


@pytest.mark.usefixtures("soak")
def test_lease_invariants_hold_in_any_order_on_postgresql(postgres: PrivatePostgres) -> None:
    run_machine(lambda: BrokerMachine(postgres.migrated_database), examples=50, steps=30)
