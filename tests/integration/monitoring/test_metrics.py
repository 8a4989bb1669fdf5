"""The metrics against what happened. Real: databases."""

from __future__ import annotations

from datetime import timedelta

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpuspawner.core.units import MICRO
from gpuspawner.devices.models import Device
from gpuspawner.engines.resource_use import MemoryKill, ResourceUse
from gpuspawner.leases.models import Request, ServerRef, Terms
from gpuspawner.ledger import repository as ledger_repository
from gpuspawner.ledger import rules as ledger_rules
from gpuspawner.monitoring.health import Symptom
from gpuspawner.monitoring.health_service import FoundSymptoms
from gpuspawner.monitoring.metrics import HubCollector
from gpuspawner.monitoring.models import DeviceUse
from gpuspawner.monitoring.resource_service import ContainerSample
from gpuspawner.services import Services
from tests.support.batch_jobs import A100, CLUSTER, H100, run
from tests.support.brokers import T0, Clock, Make, acquire, running
from tests.support.rounds import ScriptedHub, make_tick


@pytest.fixture
def services(make: Make) -> Services:
    return make(gpu_rates={"*": 4})


def read(site: HubCollector) -> dict[str, float]:
    """Every sample, as ``name{label="value"}``."""
    found = {}
    for family in text_string_to_metric_families(site.text().decode()):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


async def test_duty_rounds_are_counted_including_failures(services: Services) -> None:
    async with ScriptedHub().serving() as hub:
        tick = make_tick(services, hub)

        async def fail() -> None:
            raise ValueError("nobody foresaw this")

        site = HubCollector(services, tick.rounds)
        assert not any(name.startswith("gpuspawner_duty") for name in read(site))
        await tick.round("Sick GPUs", fail)
        await tick.round("Sick GPUs", tick.charge)
        await tick.round("Charges", tick.charge)
        seen = read(site)
    assert seen['gpuspawner_duty_rounds_total{duty="sick_gpus"}'] == 2
    assert seen['gpuspawner_duty_rounds_total{duty="charges"}'] == 1


def stopped(services: Services, lease_id: str) -> None:
    services.leases.release(lease_id, ended_at=services.clock(), reason="stopped")


def test_metrics_match_credits_leases_and_devices(services: Services) -> None:
    clock = Clock.of(services)
    site = HubCollector(services)
    before = read(site)
    assert before["gpuspawner_credits_granted_total"] == 0
    assert before['gpuspawner_leases{state="running"}'] == 0
    anna = running(services, "anna", 2)
    clock.forward(hours=1)
    services.ledger.charge_all()
    clock.forward(seconds=90)
    seen = read(site)
    assert seen["gpuspawner_credits_granted_total"] == 100
    assert seen["gpuspawner_credits_charged_total"] == 8
    assert seen["gpuspawner_credits_held"] == 0, "the hold was used up"
    assert seen["gpuspawner_credits_balance"] == 92
    assert seen["gpuspawner_charge_lag_seconds"] == pytest.approx(90)
    assert seen['gpuspawner_leases{state="running"}'] == 1
    seconds = 'gpuspawner_gpu_seconds_total{group="",model="A100-80GB"}'
    assert seen[seconds] == 2 * 3690
    assert seen['gpuspawner_devices{model="A100-80GB",state="free"}'] == 2
    assert seen['gpuspawner_devices{model="A100-80GB",state="leased"}'] == 2

    ended_at = clock.now - timedelta(minutes=31, seconds=30)
    services.leases.release(anna.id, ended_at=ended_at, reason="x")
    services.ledger.grant("member:anna", -MICRO, actor="admin", reason="taken back")
    seen = read(site)
    assert seen["gpuspawner_credits_refunded_total"] == 4
    assert seen["gpuspawner_credits_taken_total"] == 1
    assert seen["gpuspawner_credits_balance"] == 95
    assert seen[seconds] == 2 * 1800
    assert seen['gpuspawner_leases_ended_total{outcome="stopped"}'] == 1
    assert seen["gpuspawner_charge_lag_seconds"] == 0
    assert seen['gpuspawner_queue_wait_seconds{quantile="0.5"}'] == 0


def test_queue_metrics_report_length_and_wait_time(services: Services) -> None:
    clock = Clock.of(services)
    all_of_them = running(services, "anna", 4)
    server, request, terms = ServerRef("bert"), Request(devices=1), Terms(wait=True)
    ticket = services.queue.ask(server, request, engine="docker", terms=terms)
    clock.forward(minutes=7)
    seen = read(HubCollector(services))
    assert seen["gpuspawner_queue_length"] == 1
    assert seen["gpuspawner_queue_oldest_seconds"] == 420
    stopped(services, all_of_them.id)
    assert services.queue.turns(frozenset({ticket.id})) == [ticket.id]
    services.queue.start_ticket(ticket.id)
    assert services.queue.ticket(ticket.id).outcome == "granted"
    seen = read(HubCollector(services))
    assert seen["gpuspawner_queue_length"] == 0
    assert seen['gpuspawner_queue_wait_seconds{quantile="1"}'] == 420


def test_host_metrics_report_what_is_reserved_and_the_budget(make: Make) -> None:
    assert not any("_host_" in name for name in read(HubCollector(make())))
    services = make(host_memory="36G", host_cpus=9)
    acquire(services, "anna", 0, host_memory_bytes=2**33, host_milli_cpus=1500)
    seen = read(HubCollector(services))
    assert seen["gpuspawner_host_memory_reserved_bytes"] == 2**33
    assert seen["gpuspawner_host_memory_budget_bytes"] == 2**35
    assert seen["gpuspawner_host_cpus_reserved"] == 1.5
    assert seen["gpuspawner_host_cpus_budget"] == 8


def test_incremental_totals_equal_recomputed_totals(services: Services) -> None:
    """Over ten days of leases: totals of the store, and what no total has yet."""
    clock = Clock.of(services)
    services.settings.credits.opening_grant = 10_000
    site = HubCollector(services)
    long = running(services, "dora")
    for day in range(10):
        lease = running(services, f"user{day % 3}", 2)
        clock.forward(hours=9)
        services.ledger.charge_all()
        stopped(services, lease.id)
        if day == 6:
            stopped(services, long.id)
        clock.forward(hours=12 + day)
        before = read(site)
        if day % 3 == 0:
            assert services.reports.add_up()
        assert read(HubCollector(services)) == pytest.approx(before)
    cost = services.store.run(lambda c: ledger_repository.get_account(c, "system:usage").balance)
    assert read(site)["gpuspawner_credits_charged_total"] == pytest.approx(cost / MICRO)
    used = sum(value for name, value in read(site).items() if "gpu_seconds_total" in name)
    every = services.leases.of_account(None, 100)
    assert used == pytest.approx(
        sum(
            len(lease.devices) * (lease.ended_at - lease.started_at).total_seconds()
            for lease in every
            if lease.ended_at and lease.started_at
        )
    )
    owed = ledger_rules.owed
    assert cost == sum(owed(x.rate, x.started_at, x.ended_at or clock.now) for x in every)


def test_refund_or_clock_set_back_counts_nothing_twice(services: Services) -> None:
    clock = Clock.of(services)
    for number in range(3):
        lease = running(services, "anna")
        clock.forward(hours=1)
        stopped(services, lease.id)
        assert services.reports.add_up() == 1
        _, used, _ = services.reports.until_now()
        assert sum(used.seconds.values()) == 3600 * (number + 1)
        clock.forward(hours=-30)
    assert used.ended == {"": 3}
    services.ledger.refund(lease.id, actor="kim", reason="a sick GPU")
    for _ in range(2):
        moved, used, opened = services.reports.until_now()
        assert (moved.charged, moved.refunded, opened) == (12 * MICRO, 4 * MICRO, [])
        assert used.ended == {"": 2, "refunded": 1}
        assert sum(used.seconds.values()) == 3 * 3600
        services.reports.add_up()


def test_device_metrics_report_the_last_minute(services: Services) -> None:
    lease = running(services, "ada", 1)
    first, second = (view.device for view in services.monitoring.overview().devices[:2])
    assert lease.uuids == (first.uuid,)
    since = services.clock().replace(second=0, microsecond=0)
    counts = {"samples": 60, "known": 60, "measured": 60, "busy": 15, "use_sum": 60 * 20}
    worked = DeviceUse(uuid=first.uuid, since=since, seconds=60, xids=(13,), **counts)
    silent = DeviceUse(uuid=second.uuid, since=since, seconds=60, samples=60, error="It is lost.")
    services.monitoring.remember_use([worked, silent])
    told = read(HubCollector(services))

    def of(device: Device, name: str, xid: str = "") -> float | None:
        labels = f'UUID="{device.uuid}",gpu="{device.index}",group="",modelName="{device.model}"'
        return told.get(f"gpuspawner_device_{name}{{{labels}{xid}}}")

    assert of(first, "use_percent") == 20
    assert of(first, "busy_ratio") == 0.25
    assert (of(first, "answers"), of(second, "answers")) == (1, 0)
    assert of(first, "xid", ',xid="13"') == 1
    # What is not known is not told, and never as zero.
    assert of(second, "use_percent") is None


def test_batch_job_metrics_are_grouped_by_model(services: Services) -> None:
    site = HubCollector(services)
    services.job_billing.debit(CLUSTER, [])
    services.ledger.open_account("anna")
    assert not [name for name in read(site) if name.startswith("gpuspawner_batch")]
    services.job_billing.debit(
        CLUSTER,
        [
            run(1, gpus={"a100": 2}),
            run(2, T0, 600, user="nobody"),
            run(3, T0, 60, gpus={"h100": 1}, nodes=("m2",)),
            run(4, T0, 60, gpus={"a100": 1, "h100": 1}, nodes=("m1", "m2")),
            run(5, T0, 60, gpus={}, shards={"": 3}),
        ],
    )
    seen = read(site)
    for model, seconds, jobs in (
        (A100, 2 * 3600 + 600 + 3 * 60 / 4, 3),
        (H100, 60, 1),
        ("several models", 120, 1),
    ):
        assert seen[f'gpuspawner_batch_gpu_seconds_total{{model="{model}"}}'] == seconds
        assert seen[f'gpuspawner_batch_jobs_total{{model="{model}"}}'] == jobs
    assert seen["gpuspawner_credits_charged_total"] > 0


def test_health_and_drain_metrics_reflect_device_states(services: Services) -> None:
    sick, watched, drained = (device.uuid for device in services.devices.look().devices[:3])
    for uuid, cause in ((sick, "ecc"), (watched, "slowed")):
        symptom = Symptom(cause, "it was seen", services.clock())
        services.health.judge_health({uuid: FoundSymptoms((symptom,))})
    services.devices.drain(drained, actor="root")
    told = read(HubCollector(services))

    def of(uuid: str, name: str) -> list[float]:
        start = f'gpuspawner_device_{name}{{UUID="{uuid}",'
        return [value for key, value in told.items() if key.startswith(start)]

    assert (of(sick, "health"), of(watched, "health"), of(sick, "falls")) == ([2], [1], [1])
    labels = f'UUID="{sick}",cause="ecc",gpu="0",modelName="A100-80GB"'
    assert told[f"gpuspawner_device_sick{{{labels}}}"] == 1
    assert of(watched, "sick") == []
    reasons = [
        f'gpuspawner_devices_drained{{reason="{why}"}}' for why in ("health", "leak", "admin")
    ]
    assert [told[reason] for reason in reasons] == [1, 0, 1]


def test_containers_are_counted_by_environment(services: Services) -> None:
    anna, bert = running(services, "anna"), running(services, "bert", 0)
    none = [name for name in read(HubCollector(services)) if "container" in name]
    assert none == [], "nothing was measured yet"
    use = ResourceUse(cpu_seconds=1.5, memory_bytes=100, disk_written_bytes=7)
    services.resources.record([ContainerSample(each.id, "c", use) for each in (anna, bert)])
    services.resources.note_kills(bert.id, [MemoryKill(bert.id, "c", 1)])
    stopped(services, bert.id)
    seen = read(HubCollector(services))
    assert {name: value for name, value in seen.items() if "container" in name} == {
        'gpuspawner_container_memory_bytes{environment="pytorch"}': 100,
        'gpuspawner_container_cpu_seconds_total{environment="pytorch"}': 3,
        'gpuspawner_container_disk_read_bytes_total{environment="pytorch"}': 0,
        'gpuspawner_container_disk_written_bytes_total{environment="pytorch"}': 14,
        'gpuspawner_container_network_received_bytes_total{environment="pytorch"}': 0,
        'gpuspawner_container_network_sent_bytes_total{environment="pytorch"}': 0,
        'gpuspawner_container_memory_kills_total{environment="pytorch"}': 1,
    }
