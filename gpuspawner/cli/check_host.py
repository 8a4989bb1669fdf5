"""Checks that the host's budget of memory and CPU can give what environments guarantee."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..catalog.loader import Catalog
from ..catalog.models import DeviceLimits, Environment
from ..core.errors import ConfigError
from ..core.text import listing
from ..devices.models import Inventory
from ..devices.placement import leasable
from ..engines.preflight import CheckFinding, Status
from ..leases.host_resources import NOTHING, HostAmount, HostBudget, guaranteed_to
from ..leases.settings import GPUHost
from .hub import HubSettings
from .output import count

NAME = "host budget"


def check_host(
    hub: HubSettings, catalog: Catalog | None, settings: GPUHost, inventory: Inventory
) -> Iterator[CheckFinding]:
    """Yield findings about the budget, if one is set. ``catalog`` is None if none is valid."""
    try:
        budget = settings.read_budget()
    except ConfigError as error:
        yield CheckFinding(NAME, Status.FAIL, error.message, "Correct c.GPUHost.")
        return
    if budget is None:
        return
    if catalog is None and hub.spawner.catalog:
        yield CheckFinding(NAME, Status.UNCHECKED, "The catalog is not valid.")
        return
    usual = HostAmount.of(hub.spawner.mem_guarantee, hub.spawner.cpu_guarantee)
    gpus = sum(leasable(device) is None for device in inventory.devices)
    setting = "" if catalog else f"c.{type(hub.spawner).__name__}."
    catalog = catalog or Catalog.single(devices=DeviceLimits(default=1, max=1))
    yield from check_budget(budget, catalog.environments, usual, gpus, setting)


def check_budget(
    budget: HostBudget,
    environments: Iterable[Environment],
    usual: HostAmount,
    gpus: int,
    setting: str = "",
) -> Iterator[CheckFinding]:
    """Yield what is wrong with a budget, or that nothing is.

    Args:
        budget: What servers may reserve together.
        environments: Those that members can start.
        usual: What a server has where its environment guarantees nothing.
        gpus: How many GPUs can be free at once.
        setting: ``c.GPUDockerSpawner.`` if guarantees are settings of the spawner; without it, they
            are keys of the catalog.
    """
    too_large: dict[HostAmount, list[str]] = {}
    starved: dict[str, HostAmount] = {}
    left = budget.left(NOTHING, gpus, has_devices=False)
    for environment in environments:
        for name, needed in _guarantees(environment, usual).items():
            if not needed.fits(budget.total):
                too_large.setdefault(needed, []).append(name)
            elif environment.cpu_only and not needed.fits(left):
                starved[name] = needed
    for needed, names in too_large.items():
        yield _too_large(budget, needed, names, setting)
    if starved:
        yield _starved(budget, starved, left, gpus)
    elif not too_large:
        text = f"{budget.limited(budget.total)} for all servers together"
        if gpus and budget.per_free_gpu:
            said = budget.limited(left.at_least(NOTHING))
            text += f", {said} for those without a GPU while no GPU is in use"
        yield CheckFinding(NAME, Status.OK, text)


def _guarantees(environment: Environment, usual: HostAmount) -> dict[str, HostAmount]:
    """Return what servers of an environment are guaranteed, by its name and what is chosen."""
    found = {environment.slug: guaranteed_to(environment.with_options({}), usual)}
    for option, its in environment.profile_options.items():
        for choice in its.choices:
            needed = guaranteed_to(environment.with_options({option: choice}), usual)
            if needed not in found.values():
                found[f"{environment.slug} with {option}={choice}"] = needed
    return found


def _too_large(
    budget: HostBudget, needed: HostAmount, names: list[str], setting: str
) -> CheckFinding:
    most = budget.total.less_than(needed)
    text = (
        f"A server of {listing(names)} is guaranteed {needed}, but this machine has {most} for all "
        "servers together: every start is refused."
    )
    parts, settings = [], []
    if most.memory_bytes:
        size = _size(most.memory_bytes)
        parts.append(f'{setting}mem_guarantee = "{size}"' if setting else f"mem_guarantee: {size}")
        settings.append("c.GPUHost.memory less c.GPUHost.system_memory")
    if most.milli_cpus:
        cores = _cores(most.milli_cpus)
        parts.append(f"{setting}cpu_guarantee{' =' if setting else ':'} {cores}")
        settings.append("c.GPUHost.cpus less c.GPUHost.system_cpus")
    where = "" if setting else " in the catalog"
    remedy = f"Write {listing(parts)} at most{where}, or raise the budget ({listing(settings)})."
    return CheckFinding(NAME, Status.FAIL, text, remedy)


def _starved(
    budget: HostBudget, starved: dict[str, HostAmount], left: HostAmount, gpus: int
) -> CheckFinding:
    most = NOTHING
    for needed in starved.values():
        most = most.at_least(needed)
    text = (
        f"What c.GPUHost keeps for {count(gpus, 'free GPU')} leaves too little for servers without "
        f"one. With no server running, {listing(list(starved))} would wait for "
        f"{most.lacking(left)}."
    )
    parts, keys = [], []
    spare = budget.total - most
    if 0 < most.memory_bytes > left.memory_bytes:
        parts.append(f'c.GPUHost.memory_per_free_gpu = "{_size(spare.memory_bytes // gpus)}"')
        keys.append("mem_guarantee")
    if 0 < most.milli_cpus > left.milli_cpus:
        parts.append(f"c.GPUHost.cpus_per_free_gpu = {_cores(spare.milli_cpus // gpus)}")
        keys.append("cpu_guarantee")
    remedy = f"Write {listing(parts)} at most, or a smaller {listing(keys)} in the catalog."
    return CheckFinding(NAME, Status.FAIL, text, remedy)


def _size(size: int) -> str:
    """Return bytes as settings have them, rounded down; empty for less than a megabyte."""
    for unit, suffix in ((2**30, "G"), (2**20, "M")):
        if size >= unit:
            return f"{size // unit}{suffix}"
    return ""


def _cores(milli: int) -> str:
    """Return thousandths of CPU cores as settings have them, rounded down to a tenth of a core."""
    return f"{milli // 100 / 10:g}"
