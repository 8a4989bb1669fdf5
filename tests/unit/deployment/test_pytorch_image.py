"""The start file of the image with PyTorch, in a Python environment of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[3]
PROGRAM = REPO / "images" / "pytorch" / "gpuspawner_share.py"
SHOW = "import os; print(os.environ.get('PYTORCH_ALLOC_CONF', '')); "
SHOW += "print(os.environ.get('PYTORCH_CUDA_ALLOC_CONF', ''))"
LIMIT = "per_process_memory_fraction:0.225"


def environment(folder: Path, torch: str) -> Path:
    """Return the Python of a new environment that says it has this version of PyTorch."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    (found := site / f"torch-{torch}.dist-info").mkdir()
    (found / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {torch}\n")
    return folder / "bin" / "python"


def run(python: Path, *words: str, **variables: str) -> list[str]:
    done = subprocess.run(
        [python, *words], capture_output=True, text=True, check=True, env=variables
    )
    assert done.stderr == ""
    return done.stdout.split("\n")[:-1]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = environment(tmp_path_factory.mktemp("torch"), "2.13.0+cu130")
    assert run(found, str(PROGRAM)) == ["PyTorch 2.13.0+cu130 keeps within a share of a GPU"]
    return found


@pytest.mark.parametrize(
    "variables, expected",
    [
        ({}, ["", ""]),
        ({"GPUSPAWNER_GPU_SHARE": "0.25"}, [LIMIT, ""]),
        (
            {"GPUSPAWNER_GPU_SHARE": "0.25", "PYTORCH_ALLOC_CONF": "expandable_segments:True"},
            [f"expandable_segments:True,{LIMIT}", ""],
        ),
        (
            {"GPUSPAWNER_GPU_SHARE": "0.25", "PYTORCH_CUDA_ALLOC_CONF": "backend:native"},
            ["", f"backend:native,{LIMIT}"],
        ),
        (
            {
                "GPUSPAWNER_GPU_SHARE": "0.25",
                "PYTORCH_ALLOC_CONF": "per_process_memory_fraction:0.1",
            },
            ["per_process_memory_fraction:0.1", ""],
        ),
    ],
)
def test_pytorch_is_limited_to_a_share_unless_a_limit_was_chosen(
    python: Path, variables: dict[str, str], expected: list[str]
) -> None:
    assert run(python, "-c", SHOW, **variables) == expected


def test_programs_started_by_a_program_have_the_limit_once(python: Path) -> None:
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SHOW!r}], check=True)"
    assert run(python, "-c", start, GPUSPAWNER_GPU_SHARE="0.25") == [LIMIT, ""]


def test_older_pytorch_that_would_stop_with_an_error_is_left_alone(tmp_path: Path) -> None:
    python = environment(tmp_path, "2.9.1")
    said = run(python, str(PROGRAM))
    assert said == ["PyTorch 2.9.1 has no option that limits its memory"]
    assert run(python, "-c", SHOW, GPUSPAWNER_GPU_SHARE="0.25") == ["", ""]
