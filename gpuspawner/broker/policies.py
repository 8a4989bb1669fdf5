"""What becomes of a server whose account runs dry, as ``c.Broker.when_dry`` says."""

from __future__ import annotations

from collections.abc import Collection

from traitlets import Dict
from traitlets.config import LoggingConfigurable

from ..ledger.dry import Policies, Policy


class DryPolicies(LoggingConfigurable):
    """The policies of running dry."""

    policies: Policies
    """Read once."""

    when_dry = Dict(
        {"*": "stop"},
        config=True,
        help="""
        What becomes of a server when its account has run dry, by group; ``*`` is for all others.

        ``stop``: it is stopped ``grace_seconds`` after its member was told. ``session``: its
        planned session ends first (one without an end is stopped). ``{"overdraft": 20}``: it
        goes on until the account is 20 credits below zero, and not a microcredit more. Nobody
        starts a GPU that costs something meanwhile. Of several groups, the first that is named
        here counts; a group's own account goes by that group. A running server keeps the policy
        that it started with, and servers of one account share one overdraft: another amount
        counts once none of them runs. Example::

            c.Broker.when_dry = {"research": {"overdraft": 20}, "course-ml": "session"}
        """,
    )

    def policy_for(self, account: str, groups: Collection[str]) -> Policy:
        """What holds for a new server of a member of these groups, when this account pays."""
        return self.policies.of(account, groups)
