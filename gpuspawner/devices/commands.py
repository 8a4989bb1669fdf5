"""``gpuspawner devices``: lists the devices with their state, use and leases."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from ..cli.command import command
from ..cli.config import Settings
from ..cli.output import count, exact, note, show, table, utc
from ..core.units import format_memory
from ..leases import repository as leases_repository
from ..leases.models import Lease
from ..ledger.pricing import Rates
from ..monitoring.health import SICK, WATCH
from ..monitoring.models import DeviceUse
from ..services import Services, utcnow
from . import closures, repository
from .discovery import open_source
from .models import Inventory
from .repository import StoredHealth
from .snapshots import DeviceView, Overview, count_models, device_views


@command()
def devices(settings: Settings) -> int:
    """List the devices."""
    settings.require_configuration("where the devices are")
    if (missing := settings.missing_database()) is None:
        services = settings.open_services()
        leases = {lease.id: lease for lease in services.leases.open_leases()}
        told = Told(leases, services.monitoring.use_now(), services.health.device_states())
        overview = _overview(*look(settings, services), services.prices.all_rates())
    else:
        note(f"There is no database at {missing} yet: what is leased is not known.")
        told = Told({}, {}, {})
        overview = _overview(*look(settings, None), settings.services.rates.read())
    show(_plain(overview, told), _text(overview, told))
    return 1 if overview.error else 0


@dataclass(frozen=True, slots=True)
class Told:
    """What the store knows about the devices."""

    leases: dict[str, Lease]
    """The open leases, by id."""
    use: dict[str, DeviceUse]
    health: dict[str, StoredHealth]


def look(settings: Settings, services: Services | None) -> tuple[Inventory, tuple[DeviceView, ...]]:
    """Observe the devices without writing: this process may see fewer devices than the hub.

    Without services nothing is known of leases and missing devices. Raises ConfigError and
    StoreUnavailable.
    """
    elsewhere = services is not None and services.delegation.delegate
    source = elsewhere or open_source(settings.services.devices.source)
    inventory = source.observe(utcnow())
    if services is None:
        return inventory, device_views(inventory.devices, {})
    with services.store.read() as connection:
        known = repository.load_devices(connection, inventory.source)
        inventory = replace(inventory, devices=services.watch.as_known(inventory, known))
        seen = repository.as_seen(known, inventory)
        taken, closed = leases_repository.taken(connection), closures.load(connection)
    return inventory, services.devices.on_machines(device_views(seen, taken, closed))


def _overview(inventory: Inventory, views: tuple[DeviceView, ...], rates: Rates) -> Overview:
    return Overview(
        devices=views,
        models=count_models(views, rates.card(utcnow())),
        source=inventory.source,
        error=inventory.error,
        driver_version=inventory.driver_version,
        cuda_version=inventory.cuda_version,
    )


def _text(overview: Overview, told: Told) -> str:
    lines = []
    if overview.devices:
        headers = ("INDEX", "MODEL", "MEMORY", "STATE", "USE", "UUID", "DETAIL")
        rows = [
            (
                view.name,
                view.device.model,
                format_memory(view.device.memory_bytes),
                view.state,
                _use_text(told.use.get(view.device.uuid)),
                view.device.uuid,
                _detail(view, told),
            )
            for view in overview.devices
        ]
        lines += [table(headers, rows, right=("INDEX", "MEMORY", "USE")), ""]
    if overview.error:
        lines.append(f"The devices cannot be seen: {overview.error}")
    free = f"{overview.free} of {count(overview.total, 'device')} free"
    seen_by = "NVML" if overview.source == "nvml" else overview.source
    lines.append(f"{free} ({seen_by})" if overview.models else f"No devices ({seen_by})")
    return "\n".join(lines)


def _use_text(minute: DeviceUse | None) -> str:
    """Format the share of time that kernels ran or, where NVML cannot tell, if processes did."""
    if minute is None or not minute.known:
        return "?"
    if minute.use is not None:
        return f"{minute.use:.0f} %"
    return "processes" if minute.busy else "none"


def _detail(view: DeviceView, told: Told) -> str:
    lease = told.leases.get(view.lease_id or "")
    known = told.health.get(view.device.uuid)
    parts = (
        str(lease.server) if lease else "",
        view.detail,
        view.reservation,
        _health(known) if known else "",
    )
    return ", ".join(filter(None, parts))


def _health(known: StoredHealth) -> str:
    """Describe the health that the device's state does not show."""
    if known.state.verdict == WATCH and known.state.reason:
        return f"on watch: {known.state.reason}"
    if known.state.verdict == SICK and known.probe:
        return f"its last probe failed: {known.probe}"
    return ""


def _plain(overview: Overview, told: Told) -> dict[str, Any]:
    return {
        "source": overview.source,
        "error": overview.error,
        "driver_version": overview.driver_version,
        "cuda_version": overview.cuda_version,
        "total": overview.total,
        "free": overview.free,
        "devices": [_plain_device(view, told) for view in overview.devices],
        "models": [
            asdict(model) | {"rate": exact(model.rate), "part": str(model.part)}
            for model in overview.models
        ],
    }


def _plain_device(view: DeviceView, told: Told) -> dict[str, Any]:
    minute = told.use.get(view.device.uuid)
    lease = told.leases.get(view.lease_id or "")
    known = told.health.get(view.device.uuid)
    changed = {"status": view.device.status.value, "part": str(view.device.part)}
    device = asdict(view.device) | changed
    return device | {
        "state": view.state,
        "detail": view.detail,
        "lease": view.lease_id,
        "leases": view.leases,
        "free_slots": view.free_slots,
        "member": lease.server.user if lease else None,
        "health": known and _plain_health(known),
        "last_minute": minute and _plain_use(minute),
    }


def _plain_health(known: StoredHealth) -> dict[str, Any]:
    state = known.state
    return {
        "verdict": state.verdict,
        "cause": state.cause,
        "reason": state.reason,
        "since": utc(state.since),
        "falls": state.falls,
        "failed_probe": known.probe if state.verdict == SICK else "",
    }


def _plain_use(minute: DeviceUse) -> dict[str, Any]:
    return {
        "since": minute.since.isoformat(),
        "use_percent": minute.use,
        "judged_by": minute.judged_by,
        "busy_seconds": minute.busy,
        "memory_bytes": minute.memory_max,
        "watts": minute.watts,
        "celsius": minute.celsius_max,
        "error": minute.error,
    }
