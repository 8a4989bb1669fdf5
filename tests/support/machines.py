"""Runs of hypothesis' state machines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


def run_machine(new: Callable[[], RuleBasedStateMachine], examples: int, steps: int) -> None:
    """Run new machines for so many steps each; the clocks are the machines' own."""
    run_state_machine_as_test(
        cast(Any, new),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
