"""What ``gpuspawner check`` says about the host's budget. Real: pure values."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuspawner.catalog.loader import Catalog
from gpuspawner.catalog.models import DeviceLimits
from gpuspawner.cli.check_host import check_budget
from gpuspawner.core.config_models import parse_size
from gpuspawner.engines.preflight import CheckFinding, Status
from gpuspawner.leases.host_resources import NOTHING, UNLIMITED, HostAmount, HostBudget
from gpuspawner.leases.settings import GPUHost

GB = 2**30
CPU_ONLY = {"max": 0}


def catalog_of(**environments: dict[str, Any]) -> Catalog:
    """A catalog with these keys of environments by slug."""
    some = [{"slug": slug, "image": "lab", **keys} for slug, keys in environments.items()]
    return Catalog.from_mapping({"environments": some})


def findings(
    budget: HostBudget, gpus: int = 4, usual: HostAmount = NOTHING, **environments: dict[str, Any]
) -> list[CheckFinding]:
    """What the check finds, and whether it is red."""
    return list(check_budget(budget, catalog_of(**environments).environments, usual, gpus))


def budget_of(gb: int, cpus: float, per_gpu_gb: int = 0, per_gpu_cpus: float = 0) -> HostBudget:
    return HostBudget(HostAmount.of(gb * GB, cpus), HostAmount.of(per_gpu_gb * GB, per_gpu_cpus))


def test_budget_that_suffices_is_green() -> None:
    [found] = findings(
        budget_of(96, 30, 16, 4),
        cpu={"devices": CPU_ONLY, "mem_guarantee": "32G", "cpu_guarantee": 14},
        torch={"mem_guarantee": "96G"},
    )
    assert found == CheckFinding(
        "host budget",
        Status.OK,
        "96.0 GB of memory and 30 CPU cores for all servers together, 32.0 GB of memory and 14 CPU "
        "cores for those without a GPU while no GPU is in use",
    )
    memory_only = HostBudget(HostAmount(64 * GB, UNLIMITED))
    [found] = findings(memory_only, cpu={"devices": CPU_ONLY, "cpu_guarantee": 1000})
    assert found.text == "64.0 GB of memory for all servers together"


def test_reserve_that_starves_environments_without_a_gpu_is_red() -> None:
    [found] = findings(
        budget_of(64, 32, 15, 7),
        files={"devices": CPU_ONLY},
        cpu={"devices": CPU_ONLY, "mem_guarantee": "8G", "cpu_guarantee": 2},
        wide={"devices": CPU_ONLY, "cpu_guarantee": 6},
        torch={"mem_guarantee": "48G"},
    )
    assert found == CheckFinding(
        "host budget",
        Status.FAIL,
        "What c.GPUHost keeps for 4 free GPUs leaves too little for servers without one. With no "
        "server running, cpu and wide would wait for 8.0 GB of memory (4.0 GB free) and 6 CPU "
        "cores (4 free).",
        'Write c.GPUHost.memory_per_free_gpu = "14G" and c.GPUHost.cpus_per_free_gpu = 6.5 at '
        "most, or a smaller mem_guarantee and cpu_guarantee in the catalog.",
    )


@pytest.mark.parametrize(
    ("budget", "usual", "keys", "text", "remedy"),
    [
        (
            budget_of(6, 15),
            NOTHING,
            {"mem_guarantee": "9G", "cpu_guarantee": 4},
            "A server of huge is guaranteed 9.0 GB of memory and 4 CPU cores, but this machine has "
            "6.0 GB of memory for all servers together: every start is refused.",
            "Write mem_guarantee: 6G at most in the catalog, or raise the budget (c.GPUHost.memory "
            "less c.GPUHost.system_memory).",
        ),
        (
            budget_of(6, 15),
            HostAmount(7 * GB, 16000),
            {},
            "A server of huge is guaranteed 7.0 GB of memory and 16 CPU cores, but this machine "
            "has 6.0 GB of memory and 15 CPU cores for all servers together: every start is "
            "refused.",
            "Write mem_guarantee: 6G and cpu_guarantee: 15 at most in the catalog, or raise the "
            "budget (c.GPUHost.memory less c.GPUHost.system_memory and c.GPUHost.cpus less "
            "c.GPUHost.system_cpus).",
        ),
        (
            HostBudget(HostAmount(3 * GB // 2, UNLIMITED)),
            NOTHING,
            {
                "mem_guarantee": "1G",
                "profile_options": {
                    "memory": {"choices": {"some": {}, "much": {"mem_guarantee": "2G"}}}
                },
            },
            "A server of huge with memory=much is guaranteed 2.0 GB of memory, but this machine "
            "has 1.5 GB of memory for all servers together: every start is refused.",
            "Write mem_guarantee: 1G at most in the catalog, or raise the budget (c.GPUHost.memory "
            "less c.GPUHost.system_memory).",
        ),
    ],
)
def test_guarantee_above_the_budget_is_red(
    budget: HostBudget, usual: HostAmount, keys: dict[str, Any], text: str, remedy: str
) -> None:
    assert findings(budget, usual=usual, huge=keys) == [
        CheckFinding("host budget", Status.FAIL, text, remedy)
    ]


def test_guarantee_of_the_spawner_is_named_as_its_setting() -> None:
    single = Catalog.single(devices=DeviceLimits(default=1, max=1)).environments
    [found] = check_budget(budget_of(6, 15), single, HostAmount(7 * GB), 4, "c.GPUDockerSpawner.")
    assert found.remedy == (
        'Write c.GPUDockerSpawner.mem_guarantee = "6G" at most, or raise the budget '
        "(c.GPUHost.memory less c.GPUHost.system_memory)."
    )


@given(
    st.integers(1, 200),
    st.integers(1, 64),
    st.integers(1, 60),
    st.floats(0.5, 20),
    st.integers(1, 8),
    st.integers(1, 40),
    st.integers(1, 20),
)
def test_what_a_remedy_says_is_green(
    gb: int, cpus: int, per_gb: int, per_cpus: float, gpus: int, memory: int, cores: int
) -> None:
    """Whatever it advises for the reserve of GPUs suffices once it is written."""
    keys = {"devices": CPU_ONLY, "mem_guarantee": f"{memory}G", "cpu_guarantee": cores}
    [found] = findings(budget_of(gb, cpus, per_gb, per_cpus), gpus, cpu=keys)
    if "per_free_gpu" not in found.remedy:
        return
    settings = GPUHost(memory=f"{gb}G", system_memory="", cpus=float(cpus), system_cpus=0.0)
    settings.memory_per_free_gpu, settings.cpus_per_free_gpu = f"{per_gb}G", per_cpus
    for part in found.remedy.removeprefix("Write ").partition(" at most")[0].split(" and "):
        name, _, value = part.removeprefix("c.GPUHost.").partition(" = ")
        setattr(settings, name, value.strip('"') if '"' in value else float(value))
    budget = settings.read_budget()
    assert budget is not None
    assert not settings.memory_per_free_gpu or parse_size(settings.memory_per_free_gpu)
    [now] = findings(budget, gpus, cpu=keys)
    assert now.status is Status.OK, (found, now)
