"""Real: whole benchmarks, with their hub and engine, made as short as they can be.

That they run and say what they promise is checked here, not whether a target is met: that
takes more runs, and a machine that does nothing else.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys

import pytest

from tests.support.processes import REPO

SHORTEST = {
    "spawn": (),
    "click_to_lab": ("--cold", "1"),
    "burst": ("--servers", "3"),
    "poll_during_pull": (),
    "hub_overhead": ("--leases", "5"),
    "queue_hub": ("--members", "60"),
    "queue_scale": (),
    "queue_replay": ("--trace", "TRACE"),
    "queue_estimates": ("--trace", "TRACE"),
    "ledger": ("--entries", "2000"),
    "tick": ("--leases", "200"),
    "sampler": ("--seconds", "2"),
    "idle_policy": ("--sessions", "50"),
    "live_page": ("--viewers", "5", "--seconds", "3"),
    "pages": ("--members", "3", "--sessions", "2000"),
    "sharing": (),
    "packing": ("--machines", "20"),
    "runs": ("--days", "1", "--waiting", "10"),
    "busy_year": ("--leases", "500", "--charge-minutes", "100000"),
}
"""The benchmarks, and what makes them shorter than one run does."""


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Jobs wide enough that those of a few days have to wait for 600 GPUs."""
    chance = random.Random(1)
    lines = ["timestamp,duration,num_gpus,group"]
    at = 1.7e9
    for number in range(2000):
        at += chance.expovariate(1 / 1000)
        lines.append(f"{at:.0f},{chance.randint(60, 9000)},{chance.randint(1, 300)},{number % 3}")
    file = tmp_path_factory.mktemp("trace") / "jobs.csv"
    file.write_text("\n".join(lines))
    return str(file)


ELSEWHERE = {
    "slurm": "tests/slurm/test_benchmarks.py",
    "real_gpu": "tests/gpu/test_benchmarks.py",
}
"""Those that need other parts, and the file in which they are run."""


@pytest.mark.usefixtures("soak", "browsers")
@pytest.mark.parametrize("name", SHORTEST)
def test_benchmark_reports_its_figures_and_targets(name: str, trace: str) -> None:
    arguments = [trace if each == "TRACE" else each for each in SHORTEST[name]]
    command = [sys.executable, f"benchmarks/{name}.py", "--runs", "1", "--json", *arguments]
    # Only for one that hangs: the first one builds the images, where nobody did before.
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["name"] == name
    assert trace in arguments or said["figures"]["runs"] == 1
    assert said["targets"], "every benchmark has something to reach"
    met = {name: said["figures"][name] <= most for name, most in said["targets"].items()}
    assert said["ok"] is all(met.values())
    for target, is_met in met.items():
        assert f"target {'met' if is_met else 'MISSED'}: {target} " in done.stdout


def test_every_benchmark_is_run_by_a_test() -> None:
    here = {path.stem for path in (REPO / "benchmarks").glob("[a-z]*.py")}
    assert here == SHORTEST.keys() | ELSEWHERE.keys(), "each is run here, in ELSEWHERE, or is gone"
    for name, file in ELSEWHERE.items():
        assert f'"benchmarks/{name}.py"' in (REPO / file).read_text(encoding="utf-8")
    for name in here:
        text = (REPO / "benchmarks" / f"{name}.py").read_text(encoding="utf-8")
        assert 'if __name__ == "__main__":' in text, f"{name} is no program: put it into support/"
