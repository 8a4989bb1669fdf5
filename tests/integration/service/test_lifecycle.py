"""A service in which something dies or hangs, and what outlives its restart. Real: the accounting
service as a process, SQLite, HTTP; its Hub is a stand-in."""

from __future__ import annotations

import logging
import os
import signal
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from gpuspawner.service.worker import EXIT_STATUS
from gpuspawner.web.app import NAME, read_cookie_secret, secret_file
from tests.support.hub import NAVIGATION
from tests.support.processes import PATIENCE, wait_for
from tests.support.service_process import PREFIX, ServiceProcess

FAILS_ONCE = """
from gpuspawner.service.device_monitor import GPUSampler
known, calls = GPUSampler._owners, []
async def owners(self, *args):
    calls.append(args)
    if len(calls) == 1:
        raise ValueError("nobody foresaw this")
    await known(self, *args)
GPUSampler._owners = owners
"""

HANGS = """
import signal, time
from gpuspawner.service import worker as watchdog
def hang_for_good(*_):
    watchdog.HANGS_SECONDS, watchdog.STEP_SECONDS = 5.0, 0.1
    while True:
        time.sleep(1)
signal.signal(signal.SIGUSR1, hang_for_good)
"""
FEW_CONNECTIONS = "from gpuspawner.web import app\napp.MOST_CONNECTIONS = 20\n"


@pytest.fixture(scope="module")
def service(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    sampled = {"GPUMonitoring": {"sample_seconds": 1}}
    before = FAILS_ONCE + HANGS + FEW_CONNECTIONS
    with ServiceProcess(tmp_path_factory.mktemp("service"), sampled, before=before) as service:
        yield service


def test_failed_duty_is_restarted_and_counted_in_metrics(service: ServiceProcess) -> None:
    wait_for(lambda: service.rounds("sick_gpus") > 0, "sampling after its failure")
    assert service.metric("gpuspawner_duty_failures_total", duty="use_of_gpus") == 1
    assert service.metric("gpuspawner_duty_running", duty="use_of_gpus") == 1
    assert service.metric("gpuspawner_duty_failures_total", duty="charges") == 0
    assert service.metric("gpuspawner_duty_running", duty="charges") == 1
    service.wait_rounds(2)
    assert "The duty 'Use of GPUs' failed" in service.log_text()
    assert "ValueError: nobody foresaw this" in service.log_text()


def test_connections_above_the_limit_are_closed(service: ServiceProcess) -> None:
    with ExitStack() as stack:
        opened = [
            stack.enter_context(socket.create_connection(("127.0.0.1", service.port), 60))
            for _ in range(21)
        ]
        assert opened[-1].recv(1) == b""
    wait_for(lambda: service.answers(), "room for others")


def test_hanging_service_exits_and_its_forms_outlive_the_restart(service: ServiceProcess) -> None:
    ada = service.sign_in("ada")
    form = {"account": "member:ada", "_xsrf": ada.cookies.get("_xsrf", path=PREFIX)}
    ended = service.process
    assert ended is not None
    os.kill(ended.pid, signal.SIGUSR1)
    assert ended.wait(timeout=60 * PATIENCE) == EXIT_STATUS
    said = service.log_text()
    assert "The event loop did not respond for 5 s" in said
    assert "hang_for_good" in said
    service.start()  # as its Hub does
    options = {"headers": NAVIGATION, "timeout": 60, "allow_redirects": False}
    sent = ada.post(f"{service.url}payer", data=form, **options)
    assert "This form is too old" not in sent.text
    assert sent.status_code in (302, 303), sent.text
    service.wait_rounds(1)


LOG = logging.getLogger("secret")


def test_cookie_secret_is_persistent_and_private(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/gpu.sqlite"
    secret = read_cookie_secret(url, LOG)
    path = tmp_path / NAME
    assert secret_file(url) == path
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_cookie_secret(url, LOG) == secret and len(secret) == 32
    for url in ("postgresql://db/gpus", "sqlite://"):
        assert secret_file(url) == Path(NAME), "without a file, in the working directory"


@pytest.mark.parametrize("spoil", ["mode", "length", "link"])
def test_untrusted_cookie_secret_is_not_used(tmp_path: Path, spoil: str) -> None:
    url = f"sqlite:///{tmp_path}/gpu.sqlite"
    secret = read_cookie_secret(url, LOG)
    path = tmp_path / NAME
    if spoil == "mode":
        path.chmod(0o644)
    elif spoil == "length":
        path.write_bytes(secret[:-1])
    else:
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    found = read_cookie_secret(url, LOG)
    assert found != secret and len(found) == 32
    if spoil != "link":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert read_cookie_secret(url, LOG) == found


def test_unwritable_secret_folder_only_logs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"sqlite:///{tmp_path}/missing/gpu.sqlite"
    assert len(read_cookie_secret(url, LOG)) == 32
    assert "forms that are open at a restart will be refused" in caplog.text
