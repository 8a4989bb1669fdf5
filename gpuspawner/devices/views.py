"""The GPUs for admins, as a page: what each is doing, and draining."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tornado import web

from ..core.errors import CannotDrain, GPUSpawnerError
from ..core.text import LONGEST_REASON
from ..web import view_models
from ..web.pages import FormPage


class DevicesPage(FormPage):
    """Every GPU with its state and its session, and the forms that drain it and end the drain."""

    @web.authenticated
    async def get(self) -> None:
        """Send the page."""
        self.need_admin()
        await self.show_devices(device=self.get_query_argument("drain", ""))

    async def show_devices(
        self, refusal: GPUSpawnerError | None = None, device: str = "", reason: str = ""
    ) -> None:
        """Send the page; ``device`` and ``reason`` are what its form shows."""
        overview, found = await self.read(
            view_models.device_figures, self.services, self.user, True
        )
        closed = await self.read(self.services.devices.closures)
        self.show(
            "devices.html",
            overview=overview,
            devices=found,
            closed=closed,
            open_devices=[view for view in overview.devices if view.device.uuid not in closed],
            machines=any(view.machine for view in overview.devices),
            now=self.services.clock(),
            done=self.get_query_argument("done", ""),
            refusal=refusal,
            device=device,
            reason=reason,
            xsrf=self.xsrf,
        )

    @web.authenticated
    async def post(self) -> None:
        """Drain the device or end its drain.

        A drain that makes members wait longer than they were told needs a confirmation.
        """
        self.need_admin()
        device, reason = self.field("device"), self.field("reason")
        changes: dict[str, Callable[..., bool]] = {
            "drain": partial(self.services.drains.drain, anyway=self.confirmed),
            "undrain": self.services.devices.undrain,
        }
        try:
            action = "drain" if self.is_yes("drained") else "undrain"
            change = changes[action]
            done = await self.services.run(change, device, actor=self.user, reason=reason)
        except CannotDrain as refusal:
            known = refusal.fields["device"]
            self.confirm(
                "drain",
                action="devices",
                back="devices",
                fields={"device": known.uuid, "reason": reason, "drained": "yes"},
                device=known,
                reason=reason,
                late=refusal.message,
            )
            return
        except GPUSpawnerError as refusal:
            await self.show_devices(refusal, device, reason[: 2 * LONGEST_REASON])
            return
        whole = "-machine" if self.services.machines.machine_of(device) else ""
        self.go(f"devices?done={action}{whole}" if done else "devices?done=nothing")


HANDLERS = [("devices", DevicesPage)]
