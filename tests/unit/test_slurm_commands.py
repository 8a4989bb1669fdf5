"""Slurm's programs as they are called. Real: processes; the programs are small scripts."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuspawner.core.errors import SlurmRefused, SlurmUnavailable
from gpuspawner.slurm.programs import Slurm


def program(folder: Path, text: str) -> Slurm:
    file = folder / "squeue"
    file.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    file.chmod(0o755)
    return Slurm(folder=str(folder), conf="/etc/our.conf", seconds=5)


def test_words_reach_the_program_as_they_are(tmp_path: Path) -> None:
    slurm = program(tmp_path, 'for w; do echo "<$w>"; done; cat')
    nasty = ("$(touch x)", "a b", "; rm -rf /", "`id`", "'\"")
    said = slurm.run("squeue", *nasty, script="exec sleep 1\n")
    assert said == "".join(f"<{word}>\n" for word in nasty) + "exec sleep 1\n"


def test_settings_of_whoever_started_us_stay_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_ACCOUNT", "another")
    monkeypatch.setenv("SLURM_CONF", "/etc/other.conf")
    said = program(tmp_path, "env").run("squeue").splitlines()
    assert "SLURM_CONF=/etc/our.conf" in said
    assert not any(line.startswith("SBATCH_") for line in said)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", "contact"),
        ("sacctmgr: error: Problem talking to the database: Connection refused", "database"),
    ],
)
def test_who_does_not_answer_is_no_answer(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(SlurmUnavailable, match=why):
        program(tmp_path, f"echo '{text}' >&2; exit 1").run("squeue")


def test_a_refusal_is_said_in_slurms_words(tmp_path: Path) -> None:
    text = (
        "sbatch: error: Batch job submission failed: Requested node configuration is not available"
    )
    with pytest.raises(SlurmRefused, match=r"^Slurm refused it: Requested node configuration"):
        program(tmp_path, f"echo '{text}' >&2; exit 1").run("squeue")


def test_programs_that_are_missing_or_hang(tmp_path: Path) -> None:
    with pytest.raises(SlurmUnavailable, match="scontrol is not on this machine"):
        program(tmp_path, "").run("scontrol")
    with pytest.raises(SlurmUnavailable, match=r"did not answer within 0\.2 seconds"):
        Slurm(folder=program(tmp_path, "exec sleep 60").folder, seconds=0.2).run("squeue")
