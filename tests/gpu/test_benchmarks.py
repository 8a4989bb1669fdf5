"""Real: the GPU, and the parts of its benchmark that take seconds."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.processes import REPO

pytestmark = pytest.mark.gpu


@pytest.mark.usefixtures("soak")
def test_benchmark_of_a_real_gpu_reports_each_part() -> None:
    parts = ["machine", "calls", "looks", "neighbours"]
    command = [sys.executable, "benchmarks/real_gpu.py", *parts]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["part"] for each in found] == parts
    assert all("failed" not in each for each in found), found
