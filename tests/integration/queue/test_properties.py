"""Whatever happens to the line in whatever order. Real: services, SQLite and PostgreSQL.
Simulated: the clock and the devices; no engine is asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from gpuspawner.core.errors import (
    GrantingPaused,
    NoCredits,
    NoDeviceFree,
    ServerHasLease,
    TicketEnded,
    TooManyTickets,
    TooMuchAsked,
)
from gpuspawner.leases.models import Lease, Request, ServerRef, Terms
from gpuspawner.queue.models import Ticket
from gpuspawner.services import Services
from tests.support.brokers import Clock, open_services, problems
from tests.support.machines import run_machine
from tests.support.postgres import PrivatePostgres
from tests.support.tier import SOAK

MEMBERS = ("anna", "bert", "cara", "dora")
DEVICES = 4
MOST = 3
"""Devices that a member may have at once."""
OUTCOMES = {"granted", "cancelled", "expired", "replaced", "refused"}


@dataclass
class Known:
    """What the test itself knows of a ticket."""

    ticket: Ticket
    ends: list[str] = field(default_factory=list)
    """Every end that was answered; there is one at most."""


class LineMachine(RuleBasedStateMachine):
    """Members who ask and give up, a hub that grants, an admin who closes and moves."""

    def __init__(self, new_url: Callable[[], str]) -> None:
        super().__init__()
        self.url = new_url()
        self.clock = Clock()
        self.known: dict[str, Known] = {}
        self.leases: dict[str, Lease] = {}
        self.over = False
        self.paused = False
        self.drained: set[str] = set()
        self.uuids: list[str] = []
        self.services = self.new_services()
        self.service = self.new_services()
        """Another process: an admin's pages and commands."""

    def new_services(self) -> Services:
        return open_services(
            self.url,
            self.clock,
            gpu_rates={"*": 3},
            opening_grant=40,
            refresh_seconds=0,
            member_limits={"tickets": 2, "devices": MOST},
            group_weights={"research": 2},
            group_priority={"course": "course"},
        )

    @initialize()
    def the_hub_looks(self) -> None:
        self.uuids = [view.device.uuid for view in self.services.monitoring.overview().devices]
        assert len(self.uuids) == DEVICES

    @property
    def waiting(self) -> list[str]:
        return [ticket_id for ticket_id, known in self.known.items() if not known.ends]

    def either(self, elsewhere: bool) -> Services:
        """The hub's services, or another process's."""
        return self.service if elsewhere else self.services

    def free(self) -> set[str]:
        leased = {uuid for lease in self.leases.values() for uuid in lease.uuids}
        return set(self.uuids) - leased - self.drained

    def has_ended(self, ticket_id: str, outcome: str) -> None:
        self.known[ticket_id].ends.append(outcome)

    def has_started(self, lease: Lease) -> None:
        """Whatever is granted is free, open and not paused, and told to nobody else."""
        assert not self.paused or not lease.devices
        assert self.free().issuperset(lease.uuids)
        self.leases[lease.id] = lease

    # Members.

    @rule(
        user=st.sampled_from(MEMBERS),
        name=st.sampled_from(["", "lab"]),
        devices=st.integers(0, DEVICES),
        group=st.sampled_from(["", "research", "course"]),
        seconds=st.none() | st.integers(900, 90_000),
        wait=st.booleans() | st.just(True),
    )
    def a_server_is_asked_for(
        self, user: str, name: str, devices: int, group: str, seconds: int | None, wait: bool
    ) -> None:
        server = ServerRef(user, name)
        terms = Terms(groups=frozenset({group}), seconds=seconds, wait=wait)
        # Ids are random, and who comes first of two that asked at once goes by them: a replay of
        # the same steps would go another way.
        self.clock.forward(microseconds=1)
        before = {t.id for t in self.services.queue.waiting()}
        held = {lease.server for lease in self.leases.values()}
        try:
            got = self.services.queue.ask(
                server, Request(devices=devices), engine="docker", terms=terms
            )
        except ServerHasLease:
            assert server in held
        except (NoDeviceFree, GrantingPaused):
            assert not wait
        except TooMuchAsked:
            assert devices > MOST, "what could be had some day may wait for it"
        except (NoCredits, TooManyTickets):
            pass
        else:
            assert server not in held
            if isinstance(got, Lease):
                assert got.ticket_id is None
                self.has_started(got)
                return
            assert wait and devices
            for other in [i for i in self.waiting if self.known[i].ticket.server == server]:
                if other != got.id:
                    self.has_ended(other, "replaced")
            self.known.setdefault(got.id, Known(got))
            return
        assert {t.id for t in self.services.queue.waiting()} == before, "a refusal changes nothing"

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), elsewhere=st.booleans(), how=st.sampled_from(["cancelled", "expired"]))
    def a_ticket_is_ended(self, data: st.DataObject, elsewhere: bool, how: str) -> None:
        ticket_id = data.draw(st.sampled_from(self.waiting))
        ended = self.either(elsewhere).queue.end_ticket(ticket_id, how, "so it is", tell=False)
        self.has_ended(ticket_id, ended.outcome)
        again = self.services.queue.end_ticket(ticket_id, "refused", "again")
        assert again == ended, "an end is the end"

    # The hub.

    @rule(data=st.data(), missing=st.booleans())
    def the_hub_grants(self, data: st.DataObject, missing: bool) -> None:
        """Those whose spawn is there; after a restart some spawns come later."""
        present = self.waiting
        if missing and present:
            present = data.draw(st.lists(st.sampled_from(present), unique=True))
        turns = self.services.queue.turns(frozenset(present))
        assert set(turns) <= set(present) and len(turns) == len(set(turns))
        assert not (turns and self.paused)
        for ticket_id in turns:
            self.start(ticket_id)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def the_hub_starts_what_is_not_its_turn_maybe(self, data: st.DataObject) -> None:
        self.start(data.draw(st.sampled_from(list(self.known))))

    def start(self, ticket_id: str) -> None:
        known = self.known[ticket_id]
        try:
            lease = self.services.queue.start_ticket(ticket_id)
        except TicketEnded:
            # Of one whose hub has not seen the line since it was made elsewhere, or that ended.
            assert known.ends
        except (NoDeviceFree, ServerHasLease):
            assert not known.ends
        except GrantingPaused:
            assert self.paused and not known.ends
        except NoCredits:
            self.has_ended(ticket_id, "refused")
        else:
            assert not known.ends, "none is granted twice"
            assert lease.ticket_id == ticket_id
            assert lease.server == known.ticket.server
            assert len(lease.devices) == known.ticket.request.devices
            self.has_started(lease)
            self.has_ended(ticket_id, "granted")

    @rule()
    def the_hub_starts_anew(self) -> None:
        self.services.granter.give_up()
        self.services = self.new_services()
        self.services.positions.standings()

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), up=st.booleans())
    def a_server_stops(self, data: st.DataObject, up: bool) -> None:
        lease = self.leases.pop(data.draw(st.sampled_from(list(self.leases))))
        if up:
            self.services.leases.confirm(lease.id, "container")
        self.services.leases.release(lease.id, ended_at=self.clock.now, reason="stopped")

    @rule(seconds=st.integers(0, 600) | st.integers(0, 900_000))
    def time_goes_on(self, seconds: int) -> None:
        self.clock.forward(seconds=seconds)

    @rule()
    def the_clock_is_set_back(self) -> None:
        self.clock.forward(hours=-1)

    # The admin.

    @rule(elsewhere=st.booleans())
    def granting_is_paused(self, elsewhere: bool) -> None:
        assert self.either(elsewhere).devices.pause(actor="kim", reason="fans") is not self.paused
        self.paused = True

    @rule(elsewhere=st.booleans())
    def granting_goes_on(self, elsewhere: bool) -> None:
        assert self.either(elsewhere).devices.resume(actor="kim") is self.paused
        self.paused = False

    @rule(number=st.integers(0, DEVICES - 1), elsewhere=st.booleans())
    def a_device_is_drained(self, number: int, elsewhere: bool) -> None:
        uuid = self.uuids[number]
        done = self.either(elsewhere).devices.drain(uuid, actor="kim")
        assert done is (uuid not in self.drained)
        self.drained.add(uuid)

    @rule(number=st.integers(0, DEVICES - 1), elsewhere=st.booleans())
    def a_device_is_undrained(self, number: int, elsewhere: bool) -> None:
        uuid = self.uuids[number]
        done = self.either(elsewhere).devices.undrain(uuid, actor="kim")
        assert done is (uuid in self.drained)
        self.drained.discard(uuid)

    @precondition(lambda self: self.waiting)
    @rule(
        data=st.data(),
        elsewhere=st.booleans(),
        points=st.floats(-100, 100),
        position=st.none() | st.integers(1, 3),
    )
    def a_ticket_is_moved(
        self, data: st.DataObject, elsewhere: bool, points: float, position: int | None
    ) -> None:
        ticket_id, services = data.draw(st.sampled_from(self.waiting)), self.either(elsewhere)
        services.queue.boost(ticket_id, points, actor="kim")
        moved = services.queue.move(ticket_id, position, actor="kim")
        assert (moved.boost, moved.position) == (points, position)

    # What must hold after every step.

    @invariant()
    def no_device_is_leased_twice_and_the_books_are_right(self) -> None:
        assert problems(self.services.store, chains=self.over) == []
        opened = {lease.id: lease for lease in self.services.leases.open_leases()}
        assert set(opened) == set(self.leases)

    @invariant()
    def every_ticket_has_one_end_at_most_and_it_is_written(self) -> None:
        waits = {ticket.id for ticket in self.services.queue.waiting()}
        assert waits == set(self.waiting)
        for ticket_id, known in self.known.items():
            found = self.services.queue.ticket(ticket_id)
            assert [found.outcome] == (known.ends or [""])
            assert bool(found.ended_at) == bool(found.end_reason) == bool(known.ends)
            assert (found.lease_id is not None) == (found.outcome == "granted")

    @invariant()
    def everybody_who_waits_has_a_place(self) -> None:
        order = self.service.positions.order()
        assert {ticket.id for ticket, _, _ in order} == set(self.waiting)
        places = [*range(1, len(order) + 1)]
        assert [ranked.place for _, ranked, _ in order] == places
        assert [self.service.positions.place_of(ticket.id) for ticket, _, _ in order] == places
        assert all(standing.of == len(order) for _, _, standing in order)
        positions = [ticket.position for ticket, _, _ in order if ticket.position]
        assert positions == sorted(positions)
        assert all(ticket.position for ticket, _, _ in order[: len(positions)])

    def teardown(self) -> None:
        """When all is open again and everybody stops, everybody who waits gets their turn."""
        try:
            self.services.devices.resume(actor="kim")
            self.paused = False
            for uuid in list(self.drained):
                self.services.devices.undrain(uuid, actor="kim")
                self.drained.discard(uuid)
            for _ in range(3 * len(self.waiting) + 1):
                for lease in list(self.leases.values()):
                    self.services.leases.release(
                        lease.id, ended_at=self.clock.now, reason="evening"
                    )
                    del self.leases[lease.id]
                self.the_hub_grants_all()
            assert self.waiting == []
            self.over = True
            self.every_ticket_has_one_end_at_most_and_it_is_written()
            self.no_device_is_leased_twice_and_the_books_are_right()
        finally:
            self.services.store.close()

    def the_hub_grants_all(self) -> None:
        for ticket_id in self.services.queue.turns(frozenset(self.waiting)):
            self.start(ticket_id)


@pytest.mark.usefixtures("processes")
def test_queue_invariants_hold_on_sqlite(new_file: Callable[[], str]) -> None:
    examples, steps = (200, 50) if SOAK else (12, 30)
    run_machine(lambda: LineMachine(new_file), examples, steps)


@pytest.mark.usefixtures("soak")
def test_queue_invariants_hold_on_postgresql(postgres: PrivatePostgres) -> None:
    run_machine(lambda: LineMachine(postgres.migrated_database), examples=50, steps=30)
