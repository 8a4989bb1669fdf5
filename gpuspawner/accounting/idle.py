"""The service's part in idle GPUs: minutes are judged as they come, and members are told.

What it orders to be stopped is stopped beside the ends of sessions, until the server is gone.
"""

from __future__ import annotations

from datetime import datetime

from ..errors import Unavailable
from ..model import ServerRef
from .tick import Tick


class IdleDuty:
    """Rounds of this duty, one after the other."""

    def __init__(self, tick: Tick) -> None:
        self.tick = tick
        self.broker = tick.broker

    async def round(self) -> None:
        """Judge every server that holds GPUs. The Hub is asked about each when it had output; of
        whom it does not tell, nothing is judged."""
        held = await self.broker.run(self.broker.holding_gpus)
        if not held:
            return
        output: dict[ServerRef, datetime | None] = {}
        for lease in held:
            try:
                output[lease.server] = await self.tick.hub.last_activity(lease.server)
            except Unavailable as error:
                self.tick.trouble("Idle GPUs", error)
                break
        else:
            self.tick.well("Idle GPUs")
        for it in await self.broker.run(self.broker.judge_idle, output):
            if it.event == "stop":
                what = "%s is to be stopped: its GPUs were not used (lease %s)"
                self.tick.log.warning(what, it.lease.server, it.lease.id)
            elif it.event == "warn":
                what = "%s was warned: its GPUs rest (lease %s)"
                self.tick.log.info(what, it.lease.server, it.lease.id)
