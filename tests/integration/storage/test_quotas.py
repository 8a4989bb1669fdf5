"""Quotas that the file system keeps. Real: XFS with project quotas, in a kernel of its own."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.uml import run_on_xfs

pytestmark = pytest.mark.usefixtures("processes")

MB = 2**20


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The facts of all scenes of :mod:`tests.support.quota_scenes`."""
    return run_on_xfs("tests.support.quota_scenes", tmp_path_factory.mktemp("xfs"))


SCENES: dict[str, dict[str, Any]] = {
    "it is known where quotas can be kept": {
        "problem": "",
        "elsewhere": "A quota for /run cannot be enforced: its file system keeps no project quotas "
        "(XFS, mounted with prjquota).",
    },
    "no byte goes in beyond the quota": {
        "stopped": [20 * MB, "ENOSPC"],
        "full": {"used": 20 * MB, "limit": 20 * MB, "full": True},
        "other": [30 * MB, ""],
        "projects": 3,
    },
    "who makes room goes on": {
        "cleaned": {"used": 0, "limit": 20 * MB, "full": False},
        "again": [10 * MB, ""],
    },
    "a quota that is lowered holds what is there": {
        "lowered": {"used": 10 * MB, "limit": 5 * MB, "full": True},
        "not a byte": [0, "ENOSPC"],
        "room again": [MB, ""],
        "no limit": [30 * MB, ""],
    },
    "symlinks lead nowhere": {"outside": 0, "through a symlink": [30 * MB, ""]},
    "who owns a file can move it out": {"tampered": "projid = 0"},
    "a hub with the capabilities of README needs no root": {"with capabilities": str(MB)},
}


@pytest.mark.parametrize("scene", SCENES)
def test_xfs_quota_behaves_as_expected_in_each_scenario(told: dict[str, Any], scene: str) -> None:
    facts = SCENES[scene]
    assert {name: told[name] for name in facts} == facts


def test_existing_files_count_towards_the_quota(told: dict[str, Any]) -> None:
    assert 3 * MB <= told["old files"]["used"] < 3 * MB + 65536
    assert abs(told["old files"]["used"] - told["by looking"]) < 65536


def test_user_namespace_cannot_change_the_project_id(told: dict[str, Any]) -> None:
    """As README says of userns-remap."""
    assert f"projid = {told['project of bert']}" in told["in a user namespace"]


def test_unprivileged_hub_is_told_how_to_set_quotas(told: dict[str, Any]) -> None:
    assert told["not root"].startswith("A quota for /run/xfs cannot be enforced: ")
    assert 'c.GPUFolders.xfs_quota = ["sudo", "-n", "xfs_quota"]' in told["not root"]
