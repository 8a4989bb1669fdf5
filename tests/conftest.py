"""Fixtures over real parts, started when a test first asks; tiers, seed, order, skips, logs.

``tests/unit`` starts nothing. ``golden`` compares what others rely on with recorded files.
``integration`` has real databases, ``engines`` a real Docker Engine, ``hub`` a real JupyterHub with
all of it, ``slurm`` a real Slurm with several engines, ``attacks`` such a hub and who attacks it,
``gpu`` a real GPU.
"""

from __future__ import annotations

import gc
import glob
import itertools
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support import parts, tier
from tests.support.attacks import Summary
from tests.support.processes import LIVE
from tests.support.statements import compile_once

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from tests.support.engine import PrivateEngine
    from tests.support.hub import HubProcess
    from tests.support.postgres import PrivatePostgres

OWN_CLUSTER = ("test_from_one_box.py", "test_spare.py")
"""Files of tests/slurm whose tests start a cluster of their own."""
SLOWEST = ("test_wheel.py", "test_demo.py", "test_benchmarks.py", "test_kill_loop.py")
ORDER = ("unit", "golden", "integration", "engines", "hub", "slurm", "attacks", "gpu")
NO_GPU = "no NVIDIA GPU on this machine"
LOG_SHOWN = 20_000
"""Characters of each part's log that a failing test shows."""


# Hundreds of hubs, services and commands would compile our modules anew otherwise.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.pop("PYTHONUNBUFFERED", None)  # hubs do not pass it on, so no service could be forked
sys.dont_write_bytecode = False

compile_once()

# Started in the background or by nohup, we ignore Ctrl-C or a lost terminal, and everything
# that tests start would inherit that; some of it is tested with these signals.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session", autouse=True)
def _directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests run in an empty directory: what one leaves in the repository, a database say, would be
    there for the next run."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("current"))
    yield
    os.chdir(before)


# What a test may start. A test or fixture that starts a part itself, and not through a fixture
# that does, asks for one of these: see tests/support/parts.py.


@pytest.fixture(scope="session")
def hubs() -> None:
    """Hubs may be started."""


@pytest.fixture(scope="session")
def quick_hub() -> None:
    """The one hub of ``make quick`` may be started: simulated devices, local processes."""


@pytest.fixture(scope="session")
def engines() -> None:
    """Docker Engines may be started."""


@pytest.fixture(scope="session")
def clusters() -> None:
    """Slurm clusters may be started."""


@pytest.fixture(scope="session")
def postgres_servers() -> None:
    """PostgreSQL servers may be started."""


@pytest.fixture(scope="session")
def browsers() -> None:
    """Browsers may be opened."""


@pytest.fixture(scope="session")
def processes() -> None:
    """The test starts programs and waits for them, for seconds: too slow for ``make quick``."""


@pytest.fixture(scope="session")
def soak() -> None:
    """The test takes minutes: it runs in ``make soak`` only."""


@pytest.fixture(scope="session")
def rounds() -> tier.Rounds:
    """How often a kill loop repeats, from its full count: a tenth outside of ``make soak``."""
    return tier.rounds


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> random.Random:
    """Randomness from the run's seed and the test's name: the same seed repeats it."""
    return tier.chance(request.node.nodeid)


# The parts.


@pytest.fixture(scope="session")
def engine() -> Iterator[PrivateEngine]:
    """A Docker Engine with the stand-in hook; shared by all tests of the run."""
    from tests.support.engine import PrivateEngine

    with PrivateEngine() as engine:
        yield engine


@pytest.fixture(scope="session")
def images(engine: PrivateEngine) -> Any:
    """The module ``tests.support.images``, whose BASE, INSTANT, EXITS and SILENT are built."""
    from tests.support import images

    images.ensure_images(engine)
    return images


@pytest.fixture
def clean_engine(engine: PrivateEngine, images: Any) -> Iterator[PrivateEngine]:
    """The engine with its images, and with nothing else before and after the test."""
    from tests.support.engine import DEVICES

    engine.set_devices(DEVICES)
    yield engine
    engine.clean()


@pytest.fixture(scope="session")
def cdi_engine() -> Iterator[PrivateEngine]:
    """A second engine, which knows CDI, with the quick images (INSTANT, EXITS, SILENT)."""
    from tests.support import images
    from tests.support.engine import PrivateEngine

    with PrivateEngine(cdi=True) as engine:
        images.ensure_images(engine, [images.INSTANT, images.EXITS, images.SILENT])
        yield engine


@pytest.fixture(scope="session")
def postgres() -> Iterator[PrivatePostgres]:
    """A PostgreSQL server; shared by all tests of the run."""
    from tests.support.postgres import PrivatePostgres

    with PrivatePostgres() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a database without any table; the test runs once on each kind."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/gpuspawner.sqlite"
        return
    server = request.getfixturevalue("postgres")
    yield (url := server.fresh_database())
    server.drop(url)


@pytest.fixture(params=["sqlite", "postgresql"] if tier.SOAK else ["sqlite"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a database as it is after all migrations: SQLite, and in a soak PostgreSQL too.

    The mark ``each_database`` of tests/support/parts.py asks for both.
    """
    if request.param == "sqlite":
        migrated = request.getfixturevalue("migrated_file")
        yield f"sqlite:///{shutil.copy(migrated, tmp_path / 'gpuspawner.sqlite')}"
        return
    server = request.getfixturevalue("postgres")
    yield (url := server.migrated_database())
    server.drop(url)


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite database as it is after all migrations, to be copied: they take longer than most
    tests of the store."""
    from tests.support.brokers import make_tables

    path = tmp_path_factory.mktemp("store") / "migrated.sqlite"
    make_tables(f"sqlite:///{path}")
    return path


@pytest.fixture
def new_file(migrated_file: Path, tmp_path: Path) -> Callable[[], str]:
    """URLs of one SQLite database after the other, as they are after all migrations."""
    numbers = itertools.count()

    def new_url() -> str:
        return f"sqlite:///{shutil.copy(migrated_file, tmp_path / f'{next(numbers)}.sqlite')}"

    return new_url


@pytest.fixture
def hub_factory(hubs: None, tmp_path: Path) -> Iterator[Callable[..., HubProcess]]:
    """Start hubs: ``hub_factory("c.JupyterHub...", hub_ip=...)``, as HubProcess takes them."""
    from tests.support.hub import HubProcess

    with ExitStack() as started:

        def start(config: str = "", **kwargs: Any) -> HubProcess:
            number = len(list(tmp_path.glob("hub*")))
            name = kwargs.pop("name", f"hub{number or ''}")
            hub = HubProcess(tmp_path / name, config, name=name, **kwargs)
            started.callback(hub.stop)
            hub.start()
            return hub

        yield start


@pytest.fixture(scope="module")
def module_browser() -> Iterator[Browser]:
    """A headless Chromium, shared by the tests of one file. They must not be coroutines.

    Starting one takes seconds of processor time, and 90 tests need a browser.
    """
    from tests.support.browser import open_browser

    with open_browser() as browser:
        yield browser


@pytest.fixture
def browser(module_browser: Browser) -> Iterator[Browser]:
    """The same for one test, whose pages and cookies end with it."""
    yield module_browser
    for context in module_browser.contexts:
        context.close()


@pytest.fixture
def patient_sign_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a sign-in wait for its account on a busy machine, which would go on without after 3 s."""
    monkeypatch.setattr("gpuspawner.auth.mixin.OPEN_ACCOUNT_SECONDS", 120.0)


# Tiers, seed, order, skips, logs.


def _has_gpu() -> bool:
    return bool(glob.glob("/dev/nvidia[0-9]*") or glob.glob("/dev/dxg"))


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Skips(), "gpuspawner-skips")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Failures(config), "gpuspawner-failures")
    config.pluginmanager.register(Summary(), "gpuspawner-attacks")
    if config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(tier.SEED)
    settings.register_profile(
        tier.TIER,
        max_examples=tier.examples(),
        deadline=None,  # a busy machine is no failure
        database=None,  # a run depends on its seed alone
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile(tier.TIER)


def pytest_report_header() -> str:
    """Say what it takes to run the same again."""
    return f"tier: {tier.TIER}, seed: {tier.SEED} (GPUSPAWNER_TEST_SEED={tier.SEED} repeats it)"


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark each test with the parts it uses, and with ``quick`` if ``make quick`` runs it."""
    for part in parts.parts_of(item):
        item.add_marker(part)
    if parts.is_quick(item):
        item.add_marker("quick")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """While a test runs, only the parts that it declared can start."""
    with parts.allowed(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """What is imported and collected stays until the end: thousands of tests that no collection of
    garbage goes through, neither here nor while they run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Quick folders first, whatever the order of their names.

    Where several processes share the work, the slow ones: so that none of them is all that
    the others wait for in the end. A file's tests stay together, for its hub.
    """
    shared = "PYTEST_XDIST_WORKER" in os.environ

    def place(item: pytest.Item) -> int:
        folder = Path(str(item.path)).relative_to(Path(__file__).parent).parts[0]
        number = ORDER.index(folder) if folder in ORDER else -1
        if shared:
            if folder == "slurm":  # all of it is one process's: nothing takes as long
                return -len(ORDER) - 1
            return -len(ORDER) if item.path.name in SLOWEST else -number
        return number

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)  # there is no such hook where one process runs everything
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files are shared among processes; those with the shared Slurm go to one, for its cluster."""
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            shares = file.startswith("tests/slurm/") and Path(file).name not in OWN_CLUSTER
            return "tests/slurm" if shares else file

    return Files(config, log)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests of real GPUs need one."""
    if item.get_closest_marker("gpu") and not _has_gpu():
        pytest.skip(NO_GPU)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failing test shows the log of every part that runs."""
    report = yield
    if report.failed:
        if browser := getattr(item, "funcargs", {}).get("module_browser"):
            from tests.support.browser import pages_shown

            report.sections.append(("pages in the browser", pages_shown(browser)))
        for part in reversed(LIVE):  # the test's own first: CI shows the beginning of long logs
            try:
                text = part.log_text()
            except Exception as e:
                text = f"(its log cannot be read: {e})"
            report.sections.append((f"log of {part.name}", text[-LOG_SHOWN:]))
    return report


class Failures:
    """Names each failure at once: the run that it belongs to takes a while longer."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and reporter is not None:
            crash = getattr(report.longrepr, "reprcrash", None)
            why = str(crash.message) if crash and crash.message else ""
            line = f"FAILED {report.nodeid} ({report.when}): {why}"[:2000]
            reporter.write_line(f"\n{line}", red=True)


class Skips:
    """Tests that did not run. Only a missing GPU excuses one, and it is named all the same."""

    def __init__(self) -> None:
        self.excused: list[str] = []
        self.others: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self._note(report.nodeid, str(report.longrepr))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._note(report.nodeid, str(report.longrepr))

    def _note(self, test: str, why: str) -> None:
        (self.excused if NO_GPU in why else self.others).append(f"{test}: {why}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.others and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for test in self.excused:
            terminalreporter.write_line(f"not run, {NO_GPU}: {test.split(': ')[0]}")
        for test in self.others:
            terminalreporter.write_line(f"SKIPPED, which fails this run: {test}", red=True)
