"""Which files share a hub is read from them; each of a group asks for the group's hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.hub_groups import group_of
from tests.support.shared_hubs import CONFIGS, GPU_CONFIGS

HUB_TESTS = Path(__file__).parents[1] / "hub"


@pytest.mark.parametrize(
    ("text", "group"),
    [
        ('SHARED_HUB = "line"\n', "line"),
        ('import x\n\nSHARED_HUB = "one_device"\n', "one_device"),
        ('    SHARED_HUB = "line"\n', ""),
        ("", ""),
    ],
)
def test_a_group_is_a_constant_of_the_module(text: str, group: str, tmp_path: Path) -> None:
    file = tmp_path / "test_x.py"
    file.write_text(text)
    assert group_of(file) == group


def test_every_group_has_a_configuration_and_every_file_of_one_its_hub() -> None:
    groups = {file: group for file in HUB_TESTS.glob("test_*.py") if (group := group_of(file))}
    assert set(groups.values()) == {*CONFIGS, *GPU_CONFIGS}
    for file, group in groups.items():
        fixture = "shared_hub" if group in CONFIGS else "shared_gpu_hub"
        assert f"{fixture}: " in file.read_text(encoding="utf-8"), file
