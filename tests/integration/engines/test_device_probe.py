"""The probe of one device. Real: the program in a process of its own, through the dynamic linker.
Only CUDA's library is a stand-in, compiled here; ``tests/engines`` has containers."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuspawner.engines import device_probe
from gpuspawner.engines.device_probe import ProbeResult, probe_by_process
from tests.support.nvml.nvml_library import build_cuda_library

UUID = "GPU-01234567-89ab-cdef-0123-456789abcdef"
DIGITS = UUID[4:].replace("-", "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_cuda_library(tmp_path_factory.mktemp("cuda")).parent


@pytest.mark.parametrize(
    ("does", "uuid", "found"),
    [
        ("", UUID, ProbeResult(text="0.1 GiB filled and read back")),
        ("", "MIG-1", ProbeResult(text="0.1 GiB filled and read back")),
        ("", UUID.replace("f", "e"), ProbeResult(f"another device is visible ({DIGITS})")),
        ("bad", UUID, ProbeResult("memory changed by itself, 0.0 GiB from its start")),
        ("last", UUID, ProbeResult("memory changed by itself, 0.0 GiB from its start")),
        ("all", UUID, ProbeResult("memory changed by itself, 0.0 GiB from its start")),
        ("pageable", UUID, ProbeResult(text="0.1 GiB filled and read back")),
        ("pageable bad", UUID, ProbeResult("memory changed by itself, 0.0 GiB from its start")),
        ("lost", UUID, ProbeResult("it could not open the device (CUDA_ERROR_LAUNCH_FAILED)")),
        ("two", UUID, ProbeResult("2 devices are visible instead of one")),
        ("dies", UUID, ProbeResult("a program on it failed: it printed nothing")),
    ],
)
def test_probe_reports_success_or_the_failure_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch, does: str, uuid: str, found: ProbeResult
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))
    monkeypatch.setenv("GPUSPAWNER_STANDIN_CUDA", f"{DIGITS} {does}")
    assert probe_by_process(uuid) == found


def test_hanging_probe_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_probe, "PATIENCE", 0.01)
    assert probe_by_process(UUID).failure == "a program on it did not end within 0 s"
