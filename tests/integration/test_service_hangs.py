"""A service in which something dies or hangs. Real: the accounting service as a process, SQLite;
its Hub is a stand-in."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from gpuspawner.service.supervisor import EXIT_STATUS
from tests.support.processes import wait_for
from tests.support.service_process import ServiceProcess

FAILS_ONCE = """
from gpuspawner.service.device_monitor import SamplesUse
known, calls = SamplesUse._owners, []
async def owners(self, *args):
    calls.append(args)
    if len(calls) == 1:
        raise ValueError("nobody foresaw this")
    await known(self, *args)
SamplesUse._owners = owners
"""

HANGS = """
import signal, time
from gpuspawner.service import supervisor as watchdog
watchdog.HANGS_SECONDS, watchdog.STEP_SECONDS = 2.0, 0.1
def hang_for_good(*_):
    while True:
        time.sleep(1)
signal.signal(signal.SIGUSR1, hang_for_good)
"""


def test_a_duty_that_fails_is_restarted_and_seen_in_the_metrics(
    processes: None, tmp_path: Path
) -> None:
    sampled = {"GPUMonitoring": {"sample_seconds": 1}}
    with ServiceProcess(tmp_path, sampled, before=FAILS_ONCE) as service:
        wait_for(lambda: service.rounds("sick_gpus") > 0, "sampling after its failure")
        assert service.metric("gpuspawner_duty_failures_total", duty="use_of_gpus") == 1
        assert service.metric("gpuspawner_duty_running", duty="use_of_gpus") == 1
        assert service.metric("gpuspawner_duty_failures_total", duty="charges") == 0
        assert service.metric("gpuspawner_duty_running", duty="charges") == 1
        service.wait_rounds(2)
        assert "The duty 'Use of GPUs' failed" in service.log_text()
        assert "ValueError: nobody foresaw this" in service.log_text()


def test_a_service_that_hangs_ends_itself_and_says_where(processes: None, tmp_path: Path) -> None:
    with ServiceProcess(tmp_path, before=HANGS) as service:
        service.wait_rounds(2)
        ended = service.process
        assert ended is not None
        os.kill(ended.pid, signal.SIGUSR1)
        wait_for(lambda: ended.poll() is not None, "its end")
        assert ended.returncode == EXIT_STATUS
        said = service.log_text()
        assert "The event loop did not answer for 2 s" in said
        assert "hang_for_good" in said
        service.start()  # as its Hub does
        service.wait_rounds(1)
