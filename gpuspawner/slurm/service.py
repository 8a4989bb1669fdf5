"""Members of a cluster: who may use it, and with which groups.

The store and the configuration decide; Slurm is adjusted to them.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property

import sqlalchemy as sa

from ..core.errors import ConfigError, SlurmRefused, SlurmUnavailable
from ..db.engine import Store
from ..ledger import repository as ledger_repository
from ..ledger.models import member_account
from ..ledger.prices import PriceService
from ..ledger.rules import accounts_of
from ..members import repository as members_repository
from ..queue import repository as queue_repository
from ..queue.models import Priority, Ticket
from ..queue.settings import GPUQueue
from . import accounts, repository
from .accounts import Admission, Group, Person, WantedAssociations, account_of
from .cluster import Cluster, read_cluster
from .programs import CallBatcher, Slurm

PATIENCE = 5.0
"""Seconds that the start of a server waits for Slurm's database."""

KNOWN = 300.0
"""Seconds for which Slurm's knowledge of a member is trusted without another query."""

TRIES = 3
"""How often a change is repeated if Slurm's database gets others meanwhile."""


@dataclass(eq=False)
class ClusterMemberService:
    """Determines who may use the cluster, and tells Slurm."""

    store: Store
    clock: Callable[[], datetime]
    settings: GPUQueue
    cluster_file: str
    prices: PriceService
    log: logging.Logger
    _nodes: Cluster | None = field(default=None, init=False)
    _admitted: Mapping[str, tuple[Person, float]] = field(default_factory=dict, init=False)
    """What Slurm knows of members, and since when."""

    def nodes(self) -> Cluster:
        """Return the configured cluster, read once. Raises ConfigError."""
        if not self.cluster_file:
            raise ConfigError(
                "There is no cluster: write c.GPUSlurm.cluster_file, the cluster.yaml that "
                "gpuspawner slurm config wrote."
            )
        if self._nodes is None:
            self._nodes = read_cluster(self.cluster_file)
        return self._nodes

    def slurm(self) -> Slurm:
        """Return Slurm's programs, configured for the cluster. Raises ConfigError."""
        return Slurm(conf=self.nodes().slurm_conf)

    # Groups, as the hub reports them.

    def groups_with_a_say(self) -> frozenset[str]:
        """Return the groups whose members matter: those with settings and those with an account."""
        with self.store.read() as connection:
            found = {account.name for account in ledger_repository.all_accounts(connection)}
        paying = {name.removeprefix("group:") for name in found if name.startswith("group:")}
        return frozenset(paying | self._groups_with_settings())

    def note_groups(self, members: Mapping[str, Collection[str]]) -> None:
        """Record the members of groups; everybody else is in none of them."""
        mine: dict[str, frozenset[str]] = defaultdict(frozenset)
        for group, users in members.items():
            for user in users:
                mine[user] |= {group}
        with self.store.read() as connection:
            known = repository.groups(connection)
            everybody = {*known, *repository.members(connection), *mine}
        changed = {user: mine[user] for user in everybody if known.get(user) != mine[user]}
        if changed:  # mostly nobody
            with self.store.write() as connection:
                repository.put_groups(connection, changed, self.clock())

    # What Slurm should know.

    def people(self) -> list[Person]:
        """Return everybody with an account, as the cluster's scheduler should know them."""
        with self.store.read() as connection:
            names = repository.members(connection)
            groups = self.groups_of_members(connection)
            left = {each.user for each in members_repository.former_members(connection)}
            dry = self._dry(connection, names, groups)
        found = []
        for name in names:
            group, priority = self.settings.standing_of(groups.get(name, ()))
            state = {"closed": name in left, "dry": name in dry}
            found.append(Person(member=name, group=group, priority=_word(priority), **state))
        return found

    def wanted_of(self, people: Collection[Person]) -> WantedAssociations:
        """Return what Slurm should know of them, and of every group with settings."""
        groups = {
            group: Group(
                weight=float(self.settings.group_weights.get(group, 1)),
                limits=self.settings.limits_of(group)[1],
            )
            for group in self._groups_with_settings()
        }
        points = self.settings.read_policy().priority_points
        return accounts.wanted_associations(
            people,
            groups,
            self.settings.limits_of("")[0],
            {_word(priority): points[priority] for priority in Priority},
            self.nodes().most_shards,
        )

    def plan_for_cluster(self) -> accounts.SyncPlan:
        """Return the steps after which Slurm knows everybody and every group.

        Raises ConfigError, SlurmUnavailable, or SlurmRefused for an untested Slurm.
        """
        slurm, cluster = self.slurm(), self.nodes()
        accounts.check_version(slurm)
        return accounts.read_plan(slurm, cluster.name, self.wanted_of(self.people()))

    def admit_to_cluster(self, ticket: Ticket) -> Admission:
        """Ensure that Slurm accepts the jobs of a ticket's member, with the account to use.

        That is the account of the ticket's group, whatever the member's default is. Problems are
        only logged, and a member who was never known there gets their default: Slurm's database may
        be away while its controller knows the member, and otherwise it refuses by itself.
        """
        person = Person(
            member=ticket.server.user, group=ticket.group, priority=_word(ticket.priority)
        )
        known, at = self._admitted.get(person.member, (None, 0.0))
        if known == person and time.monotonic() - at < KNOWN:
            return Admission(account_of(person.group))
        is_late = False
        try:
            problems = self._newcomers.tell(person)[person]
        except (SlurmRefused, SlurmUnavailable) as error:
            problems = (error.message,)
            is_late = isinstance(error, SlurmUnavailable)
        if not problems:
            self._admitted = {**self._admitted, person.member: (person, time.monotonic())}
        for problem in problems:
            self.log.warning("Could not register %s in Slurm: %s", person.member, problem)
        if problems and known != person:
            return Admission(is_late=is_late)
        return Admission(account_of(person.group))

    # Helpers.

    def _groups_with_settings(self) -> set[str]:
        settings = self.settings
        return {*settings.group_weights, *settings.group_priority, *settings.group_limits}

    @cached_property
    def _newcomers(self) -> CallBatcher[Person, dict[Person, tuple[str, ...]]]:
        return CallBatcher(self._admit)

    def _admit(self, people: list[Person]) -> dict[Person, tuple[str, ...]]:
        """Return what could not be done for each. Raises SlurmUnavailable.

        Members who come at once, such as a whole course, are handled together.
        """
        one_place_each = {person.member: person for person in people}
        found = self._admit_all([*one_place_each.values()])
        for person in set(people) - found.keys():
            found |= self._admit_all([person])
        return found

    def _admit_all(self, people: list[Person]) -> dict[Person, tuple[str, ...]]:
        slurm, cluster = replace(self.slurm(), seconds=PATIENCE), self.nodes().name
        asked = self.wanted_of(people)
        problems: tuple[str, ...] = ()
        try:
            if not accounts.is_there(slurm, cluster, asked):
                accounts.check_version(slurm)
                problems = _bring(slurm, cluster, asked)
        except SlurmRefused as error:
            problems = (error.message,)
        if not problems or len(people) == 1:
            return dict.fromkeys(people, problems)
        return {each: said for one in people for each, said in self._admit_all([one]).items()}

    def groups_of_members(self, connection: sa.Connection) -> dict[str, frozenset[str]]:
        """Return the groups of each member, as the hub last reported, else from the roster."""
        now = self.clock()
        found: dict[str, frozenset[str]] = defaultdict(frozenset)
        for entry in members_repository.whole_roster(connection):
            if entry.holds(now):
                found[entry.user] |= {*entry.groups}
        return found | repository.groups(connection)

    def _dry(
        self,
        connection: sa.Connection,
        names: Collection[str],
        groups: Mapping[str, Collection[str]],
    ) -> frozenset[str]:
        """Return members whose usual account is empty although GPUs cost something.

        Without members who wait for a server: its payer was checked, and may be another account.
        """
        card = self.prices.rates_in(connection).card(self.clock())
        if not any(card.rate_of(d.model) for node in self.nodes().nodes for d in node.devices):
            return frozenset()
        balances = {
            account.name: account.available
            for account in ledger_repository.all_accounts(connection)
        }
        waiting = {ticket.server.user for ticket in queue_repository.waiting_tickets(connection)}
        kept = ledger_repository.all_payers(connection)
        found = set()
        for name in set(names) - waiting:
            own = member_account(name)
            usual = kept.get(name, own)
            if usual not in accounts_of(name, groups.get(name, ())):
                usual = own
            if balances.get(usual, 0) <= 0:
                found.add(name)
        return frozenset(found)


def _bring(slurm: Slurm, cluster: str, asked: WantedAssociations) -> tuple[str, ...]:
    """Bring Slurm to the wanted state, check it, and return what could not be done.

    For one of two simultaneous changes, its database may report that nothing is new, and forget the
    rest.
    """
    for _ in range(TRIES):
        plan = accounts.read_plan(slurm, cluster, asked)
        accounts.apply_plan(slurm, plan.steps)
        if plan.problems:
            return plan.problems
        if accounts.is_there(slurm, cluster, asked):
            return ()
    return ("its database does not store the changes",)


def _word(priority: int) -> str:
    return Priority(priority).name.lower()
