"""What ``gpuspawner mig`` makes and destroys, also when it is killed."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from datetime import timedelta

import pytest
import sqlalchemy as sa

from gpuspawner.core.processes import this_process
from gpuspawner.db.engine import Store
from gpuspawner.db.schema import audit, mig_instances
from gpuspawner.devices import closures
from gpuspawner.devices import repository as devices_repository
from gpuspawner.devices.closures import Closure
from gpuspawner.sharing import repository
from gpuspawner.sharing.models import MIGChange, RecordedInstance, RecordState
from tests.support.nvml.divided import KILLED, DividedMachine, dividable
from tests.support.parts import each_database

UUID = dividable().uuid
LAYOUT = "3g.20gb,2x1g.5gb"
MADE = [("1g.5gb", 0), ("1g.5gb", 1), ("3g.20gb", 4)]


def drain(store: Store, uuid: str = UUID) -> None:
    with store.write() as connection:
        closures.close(connection, Closure(uuid, store.clock(), "kim", "MIG"))


def places(machine: DividedMachine) -> list[tuple[str, int]]:
    return [(name, start) for name, start, _ in machine.layout()]


def recorded(store: Store) -> list[tuple[str, int, str]]:
    """Profile, start and state of each recorded instance."""
    with store.read() as connection:
        found = repository.load_instances(connection, UUID)
    return [(each.profile, each.placement.start, each.state.value) for each in found]


def of_gpu(connection: sa.Connection) -> list[RecordedInstance]:
    return repository.load_instances(connection, UUID)


def changes(store: Store) -> dict[str, MIGChange]:
    return store.run(repository.load_changes)


@each_database
def test_drained_gpu_gets_a_layout_and_another_one(machine: DividedMachine, store: Store) -> None:
    drain(store)
    code, said = machine.run("apply", "0", LAYOUT)
    assert code == 0, said
    assert places(machine) == MADE
    assert said.count("Made ") == 3
    with store.read() as connection:
        found = repository.load_instances(connection, UUID)
        details = list(connection.execute(sa.select(audit.c.detail)).scalars())
    assert {each.uuid for each in found} == set(machine.uuids())
    assert {each.state for each in found} == {RecordState.MADE}
    assert details == [f"{LAYOUT}: begun", f"{LAYOUT}: done"]
    kept = machine.layout()[2]
    code, said = machine.run("apply", UUID, "3g.20gb,4g.20gb")
    assert code == 0, said
    assert places(machine) == [("4g.20gb", 0), ("3g.20gb", 4)]
    assert machine.layout()[1] == kept
    code, said = machine.run("apply", UUID, "none")
    assert (code, places(machine), recorded(store), changes(store)) == (0, [], [], {})


def test_layout_that_is_there_takes_no_command(machine: DividedMachine, store: Store) -> None:
    drain(store)
    assert machine.run("apply", "0", LAYOUT)[0] == 0
    calls = machine.calls()
    assert machine.run("apply", "0", LAYOUT)[0] == 0
    assert machine.calls() == calls


@pytest.mark.parametrize(
    ("gpu", "words"),
    [
        ({"mig": False}, "is not in MIG mode"),
        ({"compute": [(4_000_001, 2**30)]}, "is used by a process (pid 4000001)"),
        (
            {"fails": {"nvmlDeviceGetGpuInstancePossiblePlacements_v2": 4}},
            "NVML shows how a GPU can be divided to root only",
        ),
    ],
    ids=["mode", "process", "permission"],
)
def test_gpu_that_cannot_be_divided_stays_as_it_is(
    machine: DividedMachine, store: Store, gpu: dict[str, object], words: str
) -> None:
    drain(store)
    machine.has(dividable(**gpu))
    code, said = machine.run("apply", "0", LAYOUT)
    assert code == 1
    assert words in said
    assert (machine.calls(), recorded(store), changes(store)) == ([], [], {})


def test_gpu_that_is_not_drained_stays_as_it_is(machine: DividedMachine, store: Store) -> None:
    code, said = machine.run("apply", "0", LAYOUT)
    assert (code, said) == (1, f"GPU 0 is not drained: gpuspawner drain {UUID} --reason MIG\n")
    assert (machine.calls(), recorded(store), changes(store)) == ([], [], {})


def test_instances_of_others_are_never_touched(machine: DividedMachine, store: Store) -> None:
    drain(store)
    machine.smi("0", "-cgi", "2g.10gb:2,1g.5gb:6", "-C")
    before = machine.layout(), machine.uuids()
    code, said = machine.run("apply", "0", "7g.40gb")
    assert code == 1
    assert "2g.10gb at 2:2 (id 1), 1g.5gb at 6:1 (id 2)" in said
    assert (machine.layout(), machine.uuids()) == before
    assert changes(store) == {}
    assert machine.run("apply", "0", "2x1g.5gb,2g.10gb")[0] == 0
    assert places(machine) == [("1g.5gb", 0), ("2g.10gb", 2), ("1g.5gb", 6)]
    assert machine.run("apply", "0", "none")[0] == 0
    assert (machine.layout(), machine.uuids()) == before


def test_place_that_is_taken_during_the_change_is_left(
    machine: DividedMachine, store: Store
) -> None:
    """The driver says "insufficient resources"; what is there decides."""
    drain(store)
    machine.beside("dies_at").write_text("5")  # the layout is recorded, and nothing begun
    assert machine.run("apply", "0", "7g.40gb")[0] == KILLED
    assert recorded(store) == [("7g.40gb", 0, "wanted")]
    machine.smi("0", "-cgi", "7g.40gb:0", "-C")
    code, said = machine.run("apply", "0", LAYOUT)
    assert code == 1
    assert "7g.40gb at 0:8 (id 1)" in said
    assert machine.layout() == [("7g.40gb", 0, 1)]
    machine.smi("0", "-dci", "-gi", "1")
    machine.smi("0", "-dgi", "-gi", "1")
    assert machine.run("apply", "0", LAYOUT)[0] == 0
    assert places(machine) == MADE


def test_refusal_of_the_driver_is_told_and_the_change_goes_on_later(
    machine: DividedMachine, store: Store
) -> None:
    drain(store)
    assert machine.run("apply", "0", "7g.40gb")[0] == 0
    machine.beside("refuses").write_text("-dgi")
    code, said = machine.run("apply", "0", LAYOUT)
    assert code == 1
    assert "In use by another client" in said
    assert "fuser -v /dev/nvidia0" in said
    assert machine.layout() == []
    assert machine.unfinished() == [("7g.40gb", 0, 1)]
    assert "In use by another client" in changes(store)[UUID].failure
    machine.beside("refuses").unlink()
    assert machine.run("apply", "0", LAYOUT)[0] == 0
    assert places(machine) == MADE
    assert changes(store) == {}


def test_command_that_is_missing_is_told(machine: DividedMachine, store: Store) -> None:
    drain(store)
    code, said = machine.run("apply", "0", LAYOUT, MIG_COMMAND="/nowhere/nvidia-smi")
    assert code == 1
    assert "/nowhere/nvidia-smi cannot be run (No such file or directory)" in said
    assert machine.run("apply", "0", LAYOUT)[0] == 0


@pytest.mark.parametrize(
    ("database_url", "after", "again"),
    [
        ("sqlite", "", "apply"),
        ("postgresql", "+", "apply"),
        ("sqlite", "+", "restore"),
    ],
    indirect=["database_url"],
    ids=["with nvidia-smi", "without nvidia-smi", "restore"],
)
def test_killed_change_is_completed(
    machine: DividedMachine,
    store: Store,
    after: str,
    again: str,
    rounds: Callable[[int], int],
    chance: random.Random,
) -> None:
    """Killed before, in and after each step, each look and each report; or at some of them."""
    drain(store)
    if again == "apply":  # a layout beside others' instances is not restored
        machine.smi("0", "-cgi", "1g.5gb:6", "-C")
    theirs, beside = machine.uuids(), places(machine)
    assert machine.run("apply", "0", "2g.10gb")[0] == 0
    fleet, records = machine.fleet.read_text(), store.run(of_gpu)
    words = ("apply", "0", "4g.20gb") if again == "apply" else ("restore",)

    def kill(at: int) -> None:
        """Kill a change at a point."""
        machine.show(fleet)
        with store.write() as connection:
            repository.replace_instances(connection, UUID, records)
        machine.beside("points").unlink(missing_ok=True)
        machine.beside("dies_at").write_text(f"{at}{after}")
        machine.run("apply", "0", "4g.20gb")
        machine.beside("dies_at").unlink()

    kill(1000)
    total = int(machine.beside("points").read_text())
    assert (places(machine), total > 20) == ([("4g.20gb", 0), *beside], True)
    before = (records[0].profile, records[0].placement.start)
    for at in chance.sample(range(1, total + 1), max(4, rounds(total))):
        kill(at)
        states = recorded(store)
        wanted = ("4g.20gb", 0)
        if again == "restore" and states == [(*before, "made")]:
            wanted = before  # the new layout was not recorded yet
        done, said = machine.run(*words)
        assert done == 0, (at, said)
        assert changes(store) == {}, at
        assert not machine.unfinished(), (at, said)
        assert places(machine) == sorted([wanted, *beside], key=lambda each: each[1]), (at, said)
        assert set(theirs) <= set(machine.uuids()), at
        assert recorded(store) == [(*wanted, "made")], at


def test_change_that_goes_on_keeps_others_out(machine: DividedMachine, store: Store) -> None:
    drain(store)
    os.mkfifo(machine.beside("waits"))
    first = machine.start("apply", "0", "7g.40gb")
    with machine.beside("waits").open("w"):  # nvidia-smi has been called
        code, said = machine.run("apply", "0", LAYOUT)
        assert code == 1
        assert said == (
            f"GPU 0 is being changed to 7g.40gb by process {first.pid}. Wait until that is done.\n"
        )
        assert machine.run("restore")[1].endswith("Wait until that is done.\n")
    assert first.wait(timeout=120) == 0
    machine.beside("waits").unlink()
    assert places(machine) == [("7g.40gb", 0)]


@each_database
def test_changes_at_once_leave_one_layout(machine: DividedMachine, store: Store) -> None:
    """One is refused, or comes after the other has ended."""
    drain(store)
    layouts = {"7g.40gb": [("7g.40gb", 0)], LAYOUT: MADE, "none": []}
    racers = {layout: machine.start("apply", "0", layout) for layout in layouts}
    said = {layout: racer.communicate(timeout=120)[0] for layout, racer in racers.items()}
    codes = {layout: racer.returncode for layout, racer in racers.items()}
    done = [layout for layout, code in codes.items() if code == 0]
    assert done, said
    assert all("is being changed to" in said[each] for each in codes.keys() - done), said
    assert places(machine) in [layouts[each] for each in done]
    assert [each[:2] for each in recorded(store)] == places(machine)
    assert changes(store) == {}


def test_restart_of_the_machine_is_undone_by_restore(machine: DividedMachine, store: Store) -> None:
    drain(store)
    assert machine.run("apply", "0", LAYOUT)[0] == 0
    assert machine.run("restore")[1] == f"{LAYOUT} False \n"
    with store.write() as connection:
        closures.reopen(connection, UUID)
        connection.execute(sa.update(mig_instances).values(boot_id="the boot before"))
    machine.has(dividable())
    code, said = machine.run("restore")
    assert (code, places(machine)) == (0, MADE), said
    assert said.endswith(f"{LAYOUT} True \n")
    with store.read() as connection:
        found = repository.load_instances(connection, UUID)
    assert {each.uuid for each in found} == set(machine.uuids())


def test_restore_leaves_a_gpu_with_unknown_instances(machine: DividedMachine, store: Store) -> None:
    """Also those at the very places of the layout: an admin's own script made them."""
    drain(store)
    assert machine.run("apply", "0", "4g.20gb,3g.20gb")[0] == 0
    with store.write() as connection:
        connection.execute(sa.update(mig_instances).values(boot_id="the boot before"))
    machine.has(dividable())
    machine.smi("0", "-cgi", "4g.20gb:0", "-C")
    before = machine.fleet.read_text()
    _, said = machine.run("restore")
    assert "instances that gpuspawner did not make (id 1), so its layout is not restored" in said
    assert machine.fleet.read_text() == before
    machine.has(dividable(mig=False))
    assert "is not in MIG mode" in machine.run("restore")[1]


def test_change_whose_process_is_in_a_container_ends_by_its_age(
    machine: DividedMachine, store: Store
) -> None:
    drain(store)
    now, there = store.clock(), this_process().split(" ")
    worker = f"{there[0]} pid:[1] {there[2]}"
    with store.write() as connection:
        repository.put_change(connection, MIGChange(UUID, "7g.40gb", now, now, worker))
        assert devices_repository.is_nvml_held(connection, now)
    code, said = machine.run("apply", "0", LAYOUT)
    assert (code, "of another container. Wait until that is done" in said) == (1, True)
    old = now - timedelta(seconds=devices_repository.HELD_SECONDS + 1)
    with store.write() as connection:
        repository.put_change(connection, MIGChange(UUID, "7g.40gb", old, old, worker))
        assert not devices_repository.is_nvml_held(connection, now)
    assert machine.run("apply", "0", LAYOUT)[0] == 0
    assert places(machine) == MADE
