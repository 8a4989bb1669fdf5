"""Quotas that the file system keeps. Real: XFS with project quotas, in a kernel of its own."""

from __future__ import annotations

from pathlib import Path

from tests.support.uml import run_on_xfs


def test_xfs_enforces_the_quotas_of_workspaces(processes: None, tmp_path: Path) -> None:
    """What is asserted is in :mod:`tests.support.quota_scenes`, which runs in that kernel."""
    assert run_on_xfs("tests.support.quota_scenes", tmp_path) == "well"
