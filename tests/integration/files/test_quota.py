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


def test_it_is_known_where_quotas_can_be_kept(told: dict[str, Any]) -> None:
    assert told["problem"] == ""
    assert told["elsewhere"] == (
        "A quota for /run cannot be kept: its file system keeps no project quotas (XFS, mounted "
        "with prjquota)."
    )


def test_no_byte_goes_in_beyond_the_quota(told: dict[str, Any]) -> None:
    assert told["stopped"] == [20 * MB, "ENOSPC"]
    assert told["full"] == {"used": 20 * MB, "limit": 20 * MB, "full": True}
    assert told["other"] == [30 * MB, ""]
    assert told["projects"] == 3


def test_who_makes_room_goes_on(told: dict[str, Any]) -> None:
    assert told["cleaned"] == {"used": 0, "limit": 20 * MB, "full": False}
    assert told["again"] == [10 * MB, ""]


def test_a_quota_that_is_lowered_holds_what_is_there(told: dict[str, Any]) -> None:
    assert told["lowered"] == {"used": 10 * MB, "limit": 5 * MB, "full": True}
    assert told["not a byte"] == [0, "ENOSPC"]
    assert told["room again"] == [MB, ""]
    assert told["no limit"] == [30 * MB, ""]


def test_files_that_were_there_count_and_symlinks_lead_nowhere(told: dict[str, Any]) -> None:
    assert 3 * MB <= told["old files"]["used"] < 3 * MB + 65536
    assert abs(told["old files"]["used"] - told["by looking"]) < 65536
    assert told["outside"] == 0
    assert told["through a symlink"] == [30 * MB, ""]


def test_who_owns_a_file_can_move_it_out_but_not_in_a_user_namespace(told: dict[str, Any]) -> None:
    """As README says: with userns-remap the kernel itself refuses."""
    assert told["tampered"] == "projid = 0"
    assert f"projid = {told['project of bert']}" in told["in a user namespace"]


def test_a_hub_that_is_not_root_is_told_what_to_set(told: dict[str, Any]) -> None:
    assert told["not root"].startswith("A quota for /run/xfs cannot be kept: ")
    assert 'c.GPUFolders.xfs_quota = ["sudo", "-n", "xfs_quota"]' in told["not root"]


def test_a_hub_with_the_capabilities_of_readme_needs_no_root(told: dict[str, Any]) -> None:
    assert told["with capabilities"] == str(MB)
