"""What the books say of jobs beside servers: what they had, at which price, for how long."""

from __future__ import annotations

from collections.abc import Iterable

from ..ledger import batch as pure
from ..ledger.pricing import RateCard
from ..slurm.usage import Part, Run
from ..store.batch import BatchJob


def price(card: RateCard, parts: Iterable[Part]) -> int:
    """Microcredits an hour; the lowest of what it may have been, where nobody can say what."""
    total = 0
    for part in parts:
        rates = [card.rate_of(model, part.slots) for model in part.models or ("",)]
        total += part.count * min(rates)
    return total


def words(parts: Iterable[Part]) -> str:
    """``2 NVIDIA A100``, ``3/4 of a Tesla T4``."""
    return pure.in_words((part.count, part.slots, part.models) for part in parts)


def shown(name: str) -> str:
    """A job's name as it can stand on a statement."""
    return "".join(c if c.isprintable() else "?" for c in name)[:60]


def reason(job: BatchJob, run: Run, amount: int) -> str:
    """What a statement says of a debit, or of what comes back."""
    if amount < 0:
        said = f"Charged too much for batch job {job.label} ({job.name}): it ran"
        return f"{said} {_lasted(run.seconds)}"
    what = f"Batch job {job.label} ({job.name}) on {job.devices}"
    if run.ended_at is None:
        return f"{what}: the first {_lasted(run.seconds // pure.HOUR * pure.HOUR)}"
    return f"{what}: {_lasted(run.seconds)}{' in all' if job.charged else ''}"


def _lasted(seconds: int) -> str:
    """``1 h 30 min``, ``2 h 5 s``: exact."""
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    parts = [(hours, "h"), (minutes, "min"), (seconds, "s")]
    return " ".join(f"{number} {unit}" for number, unit in parts if number) or "0 s"
