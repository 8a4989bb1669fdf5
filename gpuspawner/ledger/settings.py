"""The configuration of credits, ``c.GPUCredits.NAME``."""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from functools import cached_property

from traitlets import Bool, Dict, Float, Integer, List, Unicode, Union
from traitlets.config import LoggingConfigurable

from .credit_policy import CreditPolicies, CreditPolicy


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
        Minutes of GPU time that a balance must cover to start, and that are set aside.

        Example::

            c.GPUCredits.hold_minutes = 30
        """,
    )

    hold_session = Bool(
        False,
        config=True,
        help="""
        Whether a balance must cover the whole session that is asked for, which is then set
        aside, and not only its first ``hold_minutes``. What is not used comes back at the end;
        a session without an end holds ``hold_minutes``.

        Example::

            c.GPUCredits.hold_session = True
        """,
    )

    when_exhausted = Dict(
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

            c.GPUCredits.when_exhausted = {"research": {"overdraft": 20}, "course-ml": "session"}
        """,
    )

    grace_seconds = Integer(
        300,
        config=True,
        help="""
        Seconds that a server goes on after its account ran dry and the member was warned.

        Example::

            c.GPUCredits.grace_seconds = 600
        """,
    )

    warn_minutes = List(
        Float(min=0.0),
        default_value=[30.0, 10.0, 2.0],
        config=True,
        help="""
        Minutes that the credits of an account still last, its overdraft included, at which those
        whose servers it pays for are told, each once.

        Example::

            c.GPUCredits.warn_minutes = [60, 15]
        """,
    )

    charge_seconds = Float(
        60.0,
        min=0.1,
        config=True,
        help="""
        Seconds between two charges of a server, counted from its own start, so that those of
        many servers come at many moments. What a server costs does not depend on it.

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
    def policies(self) -> CreditPolicies:
        """The policies of ``when_exhausted``. Raises ConfigError naming a bad one."""
        return CreditPolicies.from_config(self.when_exhausted)

    def policy_for(self, account: str, groups: Collection[str]) -> CreditPolicy:
        """Return the policy for a new server of a member of these groups, if this account pays."""
        return self.policies.of(account, groups)

    def lead(self, seconds: int | None) -> timedelta:
        """Return how much time an account must be able to pay for when a session starts.

        ``seconds`` is the session's length; None means one without an end.
        """
        whole = self.hold_session and seconds is not None
        return timedelta(seconds=seconds or 0) if whole else timedelta(minutes=self.hold_minutes)
