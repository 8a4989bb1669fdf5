"""What jobs beside servers owe. Pure."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpuspawner.ledger import usage
from tests.support.brokers import T0

RATES = st.integers(0, 10**12)
SECONDS = st.integers(0, 10**8)


@given(RATES, st.lists(SECONDS, max_size=8), SECONDS)
def test_whatever_is_looked_at_when_a_job_pays_what_its_time_costs(
    rate: int, looks: list[int], lasted: int
) -> None:
    charged = 0
    for so_far in looks:
        due = usage.due_for_job(rate, so_far, charged, over=False)
        assert due >= 0
        charged += due
        assert charged <= usage.cost_of_job(rate, max(looks))
    for _ in range(2):  # told twice
        charged += usage.due_for_job(rate, lasted, charged, over=True)
        assert charged == usage.cost_of_job(rate, lasted) == rate * lasted // 3600


@given(st.integers(-(10**15), 10**15))
def test_a_debit_moves_what_it_says_and_nothing_is_no_transfer(amount: int) -> None:
    found = usage.debit_for_job("member:ada", amount, key="slurm:x:0", at=T0, reason="Batch job 1")
    if amount == 0:
        assert found is None
        return
    assert found is not None and found.apart
    assert found.amount_for("member:ada") == -amount
    assert found.amount_for("system:usage") == amount
