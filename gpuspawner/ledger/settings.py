"""The configuration of credits, ``c.GPUCredits.NAME``."""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from functools import cached_property

from traitlets import Bool, Dict, Float, Integer, List, Unicode, Union
from traitlets.config import LoggingConfigurable

from .credit_policy import CreditPolicy, parse_policy, policy_of


class GPUCredits(LoggingConfigurable):
    """What members get, what a start needs, and what happens when an account has run dry."""

    opening_grant = Union(
        [Float(), Unicode()],
        default_value=100.0,
        config=True,
        help="""
        Credits that a member gets once, when their account opens at first sign-in.

        Example::

            c.GPUCredits.opening_grant = 250
        """,
    )

    hold_minutes = Float(
        10.0,
        config=True,
        help="""
        Minutes of GPU time that the account must be able to pay for when a server starts. Credits
        for this time are held.

        Example::

            c.GPUCredits.hold_minutes = 30
        """,
    )

    hold_session = Bool(
        False,
        config=True,
        help="""
        Require and hold credits for the whole session that is requested, instead of its first
        ``hold_minutes``. Off by default. Unused credits come back at the end. A session without an
        end holds credits for ``hold_minutes``.

        Example::

            c.GPUCredits.hold_session = True
        """,
    )

    when_exhausted = Dict(
        {"*": "stop"},
        config=True,
        help="""
        What happens to a server when its account has no credits left, by group; ``*`` applies to
        all others.

        * ``stop`` (the default): it stops ``grace_seconds`` after its member was told.
        * ``session``: it continues to the end of its planned session. A session without an end
          stops as with ``stop``.
        * ``{"overdraft": 20}``: it continues until the account is 20 credits below zero, and never
          beyond that.

        Meanwhile the account cannot start a server with GPUs that cost anything. If a member is in
        several groups, the first one named here applies; a group's own account uses that group's
        policy. A running server keeps the policy that it started with. Servers of one account share
        one overdraft: a changed amount applies once none of them runs. Example::

            c.GPUCredits.when_exhausted = {"research": {"overdraft": 20}, "course-ml": "session"}
        """,
    )

    grace_seconds = Integer(
        300,
        config=True,
        help="""
        Seconds that a server keeps running after its account has run out of credits and its member
        was warned.

        Example::

            c.GPUCredits.grace_seconds = 600
        """,
    )

    warn_minutes = List(
        Float(min=0.0),
        default_value=[30.0, 10.0, 2.0],
        config=True,
        help="""
        Minutes before an account runs out of credits, its overdraft included, at which the members
        whose servers it pays for are warned, once each.

        Example::

            c.GPUCredits.warn_minutes = [60, 15]
        """,
    )

    charge_seconds = Float(
        60.0,
        min=0.1,
        config=True,
        help="""
        Seconds between two charges of a server. They count from the server's own start, so that the
        charges of many servers are spread over time. What a server costs does not depend on this.

        Example::

            c.GPUCredits.charge_seconds = 30
        """,
    )

    help_text = Unicode(
        "Ask your admin for more credits.",
        config=True,
        help="""
        The sentence that tells a member without credits how to get some.

        Example::

            c.GPUCredits.help_text = "Write to gpu@lab.example for more credits."
        """,
    )

    @cached_property
    def policies(self) -> dict[str, CreditPolicy]:
        """The policies of ``when_exhausted``, by group. Raises ConfigError naming a bad one."""
        return {str(group): parse_policy(group, x) for group, x in self.when_exhausted.items()}

    def policy_for(self, account: str, groups: Collection[str]) -> CreditPolicy:
        """Return the policy for a new server of a member of these groups, if this account pays."""
        return policy_of(self.policies, account, groups)

    def lead(self, seconds: int | None) -> timedelta:
        """Return how much time an account must be able to pay for when a session starts.

        ``seconds`` is the session's length; None means one without an end.
        """
        whole = self.hold_session and seconds is not None
        return timedelta(seconds=seconds or 0) if whole else timedelta(minutes=self.hold_minutes)
