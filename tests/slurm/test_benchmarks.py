"""Real: the benchmark's day on a cluster, made as short as it can be. Stand-in: the GPUs.

That it runs and says what it promises is checked here, not whether a target is met.
"""

from __future__ import annotations

import json
import subprocess
import sys

from tests.support.processes import REPO


def test_a_short_day_ends_with_its_figures() -> None:
    command = [sys.executable, "benchmarks/slurm.py", "--json", "--only", "day"]
    shorter = ["--sessions", "4", "--minutes", "0.1", "--nodes", "1"]
    done = subprocess.run(
        [*command, *shorter], cwd=REPO, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout.splitlines()[-1])
    figures = said["figures"]
    assert figures["day_lost"] == 0 and figures["day_sessions"] == 4
    assert figures["day_looks_a_second"] > 0 and figures["day_queries_a_second"] > 0
    assert figures["day_longest_step_ms"] >= figures["day_longest_step_processor_ms"] > 0
    met = [figures[name] <= most for name, most in said["targets"].items()]
    assert len(met) == 4 and said["ok"] is all(met)
