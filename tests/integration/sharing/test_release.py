"""Who must close NVML, and what is not granted, while a MIG layout is changed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from gpuspawner.core.errors import Refused
from gpuspawner.core.processes import this_process
from gpuspawner.db.engine import Store
from gpuspawner.db.schema import OPEN_LEASE
from gpuspawner.devices import closures
from gpuspawner.devices import repository as devices_repository
from gpuspawner.devices.closures import MIG, Closure
from gpuspawner.devices.models import Device, Inventory
from gpuspawner.leases import repository as leases_repository
from gpuspawner.leases.models import Slot
from gpuspawner.services import Services
from gpuspawner.sharing import repository
from gpuspawner.sharing.models import MIGChange
from tests.support.brokers import config_of
from tests.support.nvml.divided import DividedMachine, dividable
from tests.support.parts import each_database

UUID = dividable().uuid
GPU_CLOSED, MIG_CLOSED = Slot.closure("GPU-1").text, Slot.closure("MIG-1").text
HOLDER = "import pynvml; pynvml.nvmlInit(); print('open', flush=True); input()"


def drain(store: Store) -> None:
    with store.write() as connection:
        closures.close(connection, Closure(UUID, store.clock(), "kim", "MIG"))


def undrain(store: Store) -> None:
    with store.write() as connection:
        closures.reopen(connection, UUID)


@each_database
def test_hub_and_service_close_nvml_and_see_the_new_instances(
    machine: DividedMachine, store: Store
) -> None:
    drain(store)
    with machine.watched() as hub:
        assert hub.tell("look") == str([UUID])
        assert hub.tell("sample") == "[]"  # the GPU itself is not sampled in MIG mode
        assert len(store.run(devices_repository.load_nvml_clients)) == 1
        os.mkfifo(machine.beside("waits"))
        change = machine.start("apply", "0", "4g.20gb,3g.20gb")
        with machine.beside("waits").open("w"):  # the first command has begun
            assert store.run(devices_repository.load_nvml_clients) == []
            assert "is being changed" in hub.tell("look")
            assert hub.tell("sample") == "[]"
            machine.beside("waits").unlink()
        said, _ = change.communicate(timeout=120)
        assert (change.returncode, "still open" in said) == (0, False), said
        assert hub.tell("look") == str(sorted([UUID, *machine.uuids()]))
        assert hub.tell("sample") == str(sorted(machine.uuids()))


def test_other_program_that_has_nvml_open_is_reported(
    machine: DividedMachine, store: Store
) -> None:
    drain(store)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        env=machine.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout and holder.stdout.readline() == "open\n"
    code, said = machine.run("apply", "0", "7g.40gb")
    assert code == 1
    assert "7g.40gb at 0:8 was not made: " in said
    assert "In use by another client" in said
    assert machine.layout() == []
    holder.communicate("\n", timeout=60)
    assert machine.run("apply", "0", "7g.40gb")[0] == 0


def test_killed_hub_is_not_waited_for(machine: DividedMachine, store: Store) -> None:
    drain(store)
    with machine.watched() as hub:
        assert hub.tell("look") == str([UUID])
    assert len(store.run(devices_repository.load_nvml_clients)) == 1
    code, said = machine.run("apply", "0", "7g.40gb")
    assert (code, "still open" in said) == (0, False)


def test_hub_that_does_not_answer_is_waited_for_so_long(
    machine: DividedMachine, store: Store
) -> None:
    """The driver decides then."""
    drain(store)
    boot, _, ref = this_process().split(" ")
    with store.write() as connection:
        now = store.clock()
        devices_repository.add_nvml_client(connection, f"{boot} pid:[1] {ref}", now)
    code, said = machine.run("apply", "0", "7g.40gb", RELEASE_SECONDS="0.1")
    assert code == 0
    assert f"NVML is still open in process {os.getpid()} of another container" in said


@each_database
def test_grant_and_change_at_once_of_which_one_is_refused(
    machine: DividedMachine, store: Store, rounds: Callable[[int], int]
) -> None:
    """An instance is leased, or its GPU is changed, and never both."""
    for number in range(rounds(30)):
        machine.has(dividable())
        undrain(store)
        machine.smi("0", "-cgi", "2g.10gb:0", "-C")
        (instance,) = machine.uuids()
        with machine.watched() as hub:
            assert instance in hub.tell("look")
            change = machine.start("apply", "0", "2g.10gb,1g.5gb", WAITS="1")
            assert change.stdin and change.stdout and change.stdout.readline() == "ready\n"
            hub.begin(f"grant member{number}")
            drain(store)
            said, _ = change.communicate("\n", timeout=120)
            granted = hub.answer()
            with store.read() as connection:
                held = leases_repository.where(connection, OPEN_LEASE)
            assert granted in (instance, "NoDeviceFree")
            assert (granted == instance) == bool(held)
            assert (change.returncode == 0) == (len(machine.uuids()) == 2) != bool(held), said
            for lease in held:
                assert f"is leased ({lease.id})" in said
                hub.tell(f"release {lease.id}")
        with store.write() as connection:
            repository.replace_instances(connection, UUID, ())


@each_database
def test_instance_is_closed_as_its_gpu_is(store: Store) -> None:
    now = store.clock()
    gpu = Device(uuid="GPU-1", index=0, model="A100", memory_bytes=1)
    instance = Device(uuid="MIG-1", index=0, model="1g", memory_bytes=1, parent_uuid="GPU-1")
    with store.write() as connection:
        seen = Inventory(devices=(gpu, instance), observed_at=now)
        devices_repository.save_devices(connection, (), seen)

    def closed() -> tuple[dict[str, str], frozenset[str]]:
        with store.read() as connection:
            actors = {uuid: each.actor for uuid, each in closures.load(connection).items()}
            return actors, leases_repository.places_taken(connection)

    assert closed() == ({}, frozenset())
    with store.write() as connection:
        repository.put_change(connection, MIGChange("GPU-1", "1g.5gb", now, now, this_process()))
    assert closed() == ({"MIG-1": MIG}, {MIG_CLOSED})
    with store.write() as connection:
        closures.close(connection, Closure("GPU-1", now, "kim", ""))
    assert closed() == ({"GPU-1": "kim", "MIG-1": "kim"}, {GPU_CLOSED, MIG_CLOSED})
    with store.write() as connection:
        repository.end_change(connection, "GPU-1")
    assert closed() == ({"GPU-1": "kim", "MIG-1": "kim"}, {GPU_CLOSED, MIG_CLOSED})
    services = Services(config_of(database_url=store.url, device_source="nvml"))
    with pytest.raises(Refused, match="It is closed because its GPU is"):
        services.devices.undrain("MIG-1", actor="kim")
    with store.write() as connection:
        closures.reopen(connection, "GPU-1")
    assert closed() == ({}, frozenset())
