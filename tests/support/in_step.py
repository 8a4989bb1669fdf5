"""A device whose program keeps in step with whoever samples it."""

from __future__ import annotations

import threading
from datetime import datetime

from gpuspawner.monitoring.models import Sample

ENOUGH = 40


class InStep:
    """A sampler of a device that works for the first third of each ``seconds`` since the first
    sample; when it was asked often enough, it hangs as a driver may."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.began: float | None = None
        self.uses: list[int] = []

    def sample(self, now: datetime, monotonic: float) -> tuple[Sample, ...]:
        if len(self.uses) == ENOUGH:
            threading.Event().wait()
        if self.began is None:
            self.began = monotonic
        part = (monotonic - self.began) / self.seconds % 1
        self.uses.append(100 if part < 1 / 3 else 0)
        return (Sample(uuid="GPU-1", index=0, at=now, use=self.uses[-1]),)

    def is_over(self) -> bool:
        return len(self.uses) == ENOUGH
