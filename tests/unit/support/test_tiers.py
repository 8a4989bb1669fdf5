"""A test that starts a part which it has not asked for fails: its tier would be wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.browser import open_browser
from tests.support.engine import PrivateEngine
from tests.support.hub import HubProcess
from tests.support.parts import UndeclaredPart, in_test, is_quick, parts_of
from tests.support.postgres import PrivatePostgres
from tests.support.slurm_cluster import SlurmCluster


@pytest.mark.parametrize(
    ("start", "fixture"),
    [
        (lambda folder: PrivateEngine().start(), "`cdi_engine` or `engine` or `engines`"),
        (lambda folder: PrivatePostgres().start(), "`postgres` or `postgres_servers`"),
        (lambda folder: open_browser().__enter__(), "`browsers` or `module_browser`"),
        (lambda folder: SlurmCluster().start(), "`clusters` or `shared_cluster`"),
        (lambda folder: HubProcess(folder).start(), "`hubs`"),
    ],
)
def test_undeclared_part_does_not_start(
    start: Callable[[Path], object], fixture: str, tmp_path: Path
) -> None:
    with pytest.raises(UndeclaredPart, match=fixture):
        start(tmp_path)


def test_tier_follows_from_the_fixtures_of_a_test(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert parts_of(request.node) == frozenset() and is_quick(request.node)
    assert in_test()
    monkeypatch.setattr("tests.support.parts._allowed", None)
    assert not in_test()


@pytest.mark.usefixtures("processes")
def test_process_fixture_makes_a_test_not_quick(request: pytest.FixtureRequest) -> None:
    assert parts_of(request.node) == {"process"} and not is_quick(request.node)
