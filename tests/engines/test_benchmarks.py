"""Real: whole benchmarks, with their hub and engine, made as short as they can be.

That they run and say what they promise is checked here, not whether a target is met: that
takes more runs, and a machine that does nothing else.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.processes import REPO

SHORTEST = {
    "spawn": (),
    "burst": ("--servers", "3"),
    "poll_during_pull": (),
    "hub_overhead": ("--leases", "5"),
}
"""The benchmarks, and what makes them shorter than one run does."""


@pytest.mark.parametrize("name", SHORTEST)
def test_a_benchmark_ends_with_its_figures(name: str) -> None:
    command = [sys.executable, f"benchmarks/{name}.py", "--runs", "1", "--json", *SHORTEST[name]]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["name"] == name
    assert said["figures"]["runs"] == 1
    assert said["targets"], "every benchmark has something to reach"
    met = {name: said["figures"][name] <= most for name, most in said["targets"].items()}
    assert said["ok"] is all(met.values())
    for target, is_met in met.items():
        assert f"target {'met' if is_met else 'MISSED'}: {target} " in done.stdout


def test_make_bench_runs_every_benchmark_and_nothing_else() -> None:
    here = {path.stem for path in (REPO / "benchmarks").glob("[a-z]*.py")}
    assert here >= SHORTEST.keys()
    for name in here:
        text = (REPO / "benchmarks" / f"{name}.py").read_text(encoding="utf-8")
        assert 'if __name__ == "__main__":' in text, f"{name} is no program: put it into support/"
