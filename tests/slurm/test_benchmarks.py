"""Real: the benchmark on a cluster, each part made as short as it can be. Stand-in: the GPUs.

That it runs and says what it promises is checked here, not whether a target is met.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.support.processes import REPO


def said(part: str, *words: str) -> dict[str, Any]:
    """What one part alone says at its end."""
    command = [sys.executable, "benchmarks/slurm.py", "--json", "--only", part, *words]
    # Only for one that hangs: the first one builds the images, where nobody did before.
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    met = [found["figures"][name] <= most for name, most in found["targets"].items()]
    assert found["ok"] is all(met)
    return found


def test_spawn_benchmark_reports_figures_for_both_sides(soak: None, clusters: None) -> None:
    found = said("spawns", "--runs", "1", "--kernels", "1")
    figures = found["figures"]
    assert figures["runs"] == 1 and found["targets"].keys() == {"kernel_ratio"}
    for what in ("ready", "gone", "kernel"):
        assert figures[f"{what}_cluster_s"] > 0 and figures[f"{what}_single_s"] > 0


def test_fault_benchmark_reports_figures_for_each_fault(soak: None, clusters: None) -> None:
    found = said("faults", "--runs", "1", "--faults", "1")
    faults = {"GPU_freed", "container_dead", "node_lost"}
    assert found["targets"].keys() == {f"{fault}_worst_s" for fault in faults}
    assert all(found["figures"][f"{fault}_s"] > 0 for fault in faults)


def test_day_benchmark_reports_its_figures(soak: None, clusters: None) -> None:
    found = said("day", "--sessions", "4", "--minutes", "0.1", "--nodes", "1")
    figures = found["figures"]
    assert figures["day_lost"] == 0 and figures["day_sessions"] == 4
    assert figures["day_looks_a_second"] > 0 and figures["day_queries_a_second"] > 0
    assert figures["day_longest_step_ms"] >= figures["day_longest_step_processor_ms"] > 0
    assert len(found["targets"]) == 4
