"""What is read from an engine's answers about the use of a container: recorded ones of cgroups v1
(Engine 20.10) and v2 (its documented form too)."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuspawner.engines.resource_use import (
    REPORT,
    MemoryKill,
    ReportedUse,
    ResourceUse,
    memory_kill,
    read_report,
    read_stats,
)
from gpuspawner.runs import run_program

READ_AT = datetime(2026, 11, 29, 8, 57, 24, 208518, timezone.utc)
V1: dict[str, Any] = {
    "read": "2026-11-29T08:57:24.208518212Z",
    "preread": "0001-01-01T00:00:00Z",
    "pids_stats": {"current": 2},
    "blkio_stats": {
        "io_service_bytes_recursive": [
            {"major": 252, "minor": 0, "op": "Read", "value": 4096},
            {"major": 252, "minor": 0, "op": "Write", "value": 8192},
            {"major": 252, "minor": 0, "op": "Sync", "value": 12288},
            {"major": 252, "minor": 0, "op": "Total", "value": 12288},
            {"major": 253, "minor": 0, "op": "Read", "value": 4},
            {"major": 253, "minor": 0, "op": "Write", "value": 0},
        ]
    },
    "cpu_stats": {
        "cpu_usage": {"total_usage": 33810946, "percpu_usage": [18678023, 15132923]},
        "system_cpu_usage": 1732490000000,
    },
    "memory_stats": {
        "usage": 983040,
        "max_usage": 4079616,
        "stats": {"inactive_file": 1, "total_inactive_file": 83040, "rss": 204800},
        "failcnt": 3,
        "limit": 67108864,
    },
    "networks": {
        "eth0": {"rx_bytes": 90, "tx_bytes": 7},
        "eth1": {"rx_bytes": 10, "tx_bytes": 0},
    },
}
V2: dict[str, Any] = {
    "read": "2026-11-29T08:57:24.208518212Z",
    "blkio_stats": {
        "io_service_bytes_recursive": [
            {"major": 8, "minor": 0, "op": "read", "value": 100},
            {"major": 8, "minor": 0, "op": "write", "value": 200},
        ]
    },
    "cpu_stats": {"cpu_usage": {"total_usage": 2_500_000_000}},
    "memory_stats": {
        "usage": 10_000,
        "stats": {"anon": 6000, "file": 4000, "inactive_file": 3000},
        "limit": 64_000,
    },
    "networks": {"eth0": {"rx_bytes": 5, "tx_bytes": 6}},
}
V2_WITHOUT_NETWORK: dict[str, Any] = {
    "read": "2026-11-29T08:57:24.208518212Z",
    "blkio_stats": {
        "io_service_bytes_recursive": [
            {"major": 98, "minor": 16, "op": "read", "value": 0},
            {"major": 98, "minor": 16, "op": "write", "value": 10486784},
        ],
        "io_serviced_recursive": None,
    },
    "cpu_stats": {"cpu_usage": {"total_usage": 0, "usage_in_kernelmode": 0}, "online_cpus": 1},
    "memory_stats": {
        "usage": 10760192,
        "stats": {"active_file": 0, "anon": 57344, "file": 10485760, "inactive_file": 10485760},
        "limit": 67108864,
    },
}
"""Of a container that wrote 10 MB (Engine 20.10 in user-mode Linux)."""
STOPPED: dict[str, Any] = {
    "read": "0001-01-01T00:00:00Z",
    "blkio_stats": {"io_service_bytes_recursive": None},
    "cpu_stats": {"cpu_usage": {"total_usage": 0}},
    "memory_stats": {},
}
OOM: dict[str, Any] = {
    "Type": "container",
    "Action": "oom",
    "Actor": {"ID": "d19f", "Attributes": {"gpuspawner.lease": "abc", "name": "great_napier"}},
    "time": 1795942644,
    "timeNano": 1795942644359755226,
}


def test_every_figure_is_read_from_cgroups_v1() -> None:
    assert read_stats(V1) == ResourceUse(
        read_at=READ_AT,
        cpu_seconds=0.033810946,
        memory_bytes=900_000,
        memory_highest_bytes=4079616,
        memory_limit_bytes=67108864,
        disk_read_bytes=4100,
        disk_written_bytes=8192,
        network_received_bytes=100,
        network_sent_bytes=7,
    )


def test_every_figure_but_the_highest_is_read_from_cgroups_v2() -> None:
    assert read_stats(V2) == ResourceUse(
        read_at=READ_AT,
        cpu_seconds=2.5,
        memory_bytes=7000,
        memory_limit_bytes=64_000,
        disk_read_bytes=100,
        disk_written_bytes=200,
        network_received_bytes=5,
        network_sent_bytes=6,
    )


def test_container_without_a_network_has_no_figure_of_one() -> None:
    assert read_stats(V2_WITHOUT_NETWORK) == ResourceUse(
        read_at=READ_AT,
        cpu_seconds=0.0,
        memory_bytes=274432,
        memory_limit_bytes=67108864,
        disk_read_bytes=0,
        disk_written_bytes=10486784,
    )


ENDED: dict[str, Any] = {
    "State": {
        "StartedAt": "2026-11-29T08:57:24.208518212Z",
        "FinishedAt": "2026-11-29T08:58:24.208518212Z",
    },
    "HostConfig": {"Memory": 67108864},
}
MACHINE: dict[str, Any] = {"NCPU": 2, "MemTotal": 2**33}
SAID = REPORT + '{"cpu_seconds": 4.5, "memory_bytes": 31862784}'


def test_report_of_a_run_is_read_with_what_the_engine_knows() -> None:
    assert run_program.REPORT == REPORT
    told = read_report(SAID, ENDED, MACHINE)
    assert told == ReportedUse(
        cpu_seconds=4.5,
        memory_bytes=31862784,
        cpus=2,
        memory_limit_bytes=67108864,
        started_at=READ_AT,
        ended_at=READ_AT + timedelta(minutes=1),
    )
    told = read_report(SAID, {**ENDED, "HostConfig": {"Memory": 0}}, MACHINE)
    assert told is not None and told.memory_limit_bytes == 2**33


@pytest.mark.parametrize(
    "line",
    [
        "",
        "epoch 9",
        REPORT,
        REPORT + "epoch 9",
        REPORT + "[]",
        REPORT + "{}",
        REPORT + "[" * 100_000,
        REPORT + '{"cpu_seconds": 4.5}',
        REPORT + '{"cpu_seconds": null, "memory_bytes": 1}',
        REPORT + '{"cpu_seconds": NaN, "memory_bytes": 1}',
        REPORT + '{"cpu_seconds": 1e999, "memory_bytes": 1}',
        REPORT + '{"cpu_seconds": 1' + 400 * "0" + ', "memory_bytes": 1}',
        REPORT + '{"cpu_seconds": 4.5, "memory_bytes": -1}',
        REPORT + '{"cpu_seconds": 4.5, "memory_bytes": 1.5}',
    ],
)
def test_what_is_no_report_is_ignored(line: str) -> None:
    assert read_report(line, ENDED, MACHINE) is None


def test_report_of_a_container_that_did_not_end_is_ignored() -> None:
    state = {**ENDED["State"], "FinishedAt": "0001-01-01T00:00:00Z"}
    assert read_report(SAID, {**ENDED, "State": state}, MACHINE) is None


def test_stopped_container_has_no_figures() -> None:
    assert read_stats(STOPPED) is None
    assert read_stats({}) is None


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"cpu_stats": None, "memory_stats": [], "blkio_stats": {}, "networks": None},
        {
            "cpu_stats": {"cpu_usage": {"total_usage": "many"}},
            "memory_stats": {"usage": None, "limit": True},
            "blkio_stats": {"io_service_bytes_recursive": [{"op": "Read"}, 3, None]},
            "networks": {"eth0": {"rx_bytes": -1}, "eth1": None},
        },
    ],
)
def test_figures_that_an_engine_does_not_report_are_none(answer: dict[str, Any]) -> None:
    assert read_stats({"read": V1["read"], **answer}) == ResourceUse(read_at=READ_AT)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(st.fixed_dictionaries({}, optional={name: _JSON for name in V1 if name != "read"}))
def test_no_answer_is_too_strange_to_be_read(answer: dict[str, Any]) -> None:
    found = read_stats({"read": V1["read"], **answer})
    assert isinstance(found, ResourceUse)


def test_kill_is_read_from_an_event_about_a_lease() -> None:
    assert memory_kill(OOM, "gpuspawner.lease") == MemoryKill("abc", "d19f", 1795942644359755226)
    assert memory_kill(OOM, "another.label") is None
    assert memory_kill({**OOM, "timeNano": None}, "gpuspawner.lease") is None
    assert memory_kill({}, "gpuspawner.lease") is None
