"""Changes of MIG layouts: planned, recorded before they are done, and resumed after a crash.

A change is claimed in the store, so that nothing is granted on the GPU and every process of ours
closes NVML. Then each instance that is to be made or destroyed is recorded, and only then done by a
command. Each step looks at what exists, not at what a command returned, so it can be repeated: a
process that is killed at any moment leaves a change that the next one completes. No matter what the
store says, the driver refuses to destroy an instance that is in use.
"""

from __future__ import annotations

import logging
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

import sqlalchemy as sa

from ..core.errors import ConfigError, GPUSpawnerError, Unavailable
from ..core.processes import boot_id, describe, find_by_words, is_surely_gone, this_process
from ..db import audit_log
from ..db.engine import Store
from ..devices import closures
from ..devices import repository as devices_repository
from ..devices.models import Inventory, MIGInstance, MIGState
from . import repository, rules
from .models import LayoutPlan, MIGChange, RecordedInstance, RecordState
from .rules import CannotDivide
from .settings import GPUSharing

COMMAND_SECONDS = 60.0
"""Seconds that one command may take; the driver needs about one."""

RELEASE_SECONDS = 20.0
"""Seconds that hub and accounting service get to close NVML."""

Say = Callable[[str], None]
"""Reports a step to the admin who waits for it."""


def _read_states(device: str | None) -> list[MIGState]:
    from ..devices.mig import read_mig_state, read_mig_states  # NVML, only for these commands

    return read_mig_states() if device is None else [read_mig_state(device)]


@dataclass(frozen=True, slots=True)
class RestoredLayout:
    """What was done to restore the layout of a GPU."""

    gpu_uuid: str
    layout: str
    done: bool = False
    """True if instances were made."""
    refusal: str = ""
    """Why the layout is not complete; empty if it is."""


@dataclass(eq=False)
class MIGService:
    """Divides the GPUs of this machine into MIG instances."""

    store: Store
    clock: Callable[[], datetime]
    settings: GPUSharing
    source: str
    """The device source; only NVML's GPUs can be divided."""
    log: logging.Logger
    read_states: Callable[[str | None], list[MIGState]] = _read_states
    release_seconds: float = RELEASE_SECONDS

    # What there is.

    def show(self) -> list[tuple[MIGState, list[RecordedInstance], MIGChange | None]]:
        """Return each GPU with its recorded instances and its change, if any.

        Raises Unavailable, also if only root may see them.
        """
        self._require_nvml()
        states = self.read_states(None)
        with self.store.read() as connection:
            records = repository.load_all_instances(connection)
            changes = repository.load_changes(connection)
        return [(gpu, records.get(gpu.uuid, []), changes.get(gpu.uuid)) for gpu in states]

    def missing_instances(self, inventory: Inventory) -> dict[str, list[RecordedInstance]]:
        """Return the recorded instances that a snapshot of the devices does not have, by GPU."""
        there = {device.uuid for device in inventory.devices}
        records = self.store.run(repository.load_all_instances)
        found = {
            gpu: [
                each for each in some if each.state is RecordState.MADE and each.uuid not in there
            ]
            for gpu, some in records.items()
            if gpu in there
        }
        return {gpu: some for gpu, some in found.items() if some}

    def count_recorded(self) -> int:
        """Return how many instances gpuspawner has made, or is to make or destroy."""
        return sum(map(len, self.store.run(repository.load_all_instances).values()))

    def stopped_changes(self) -> list[MIGChange]:
        """Return the changes that failed, or whose process was killed."""
        changes = self.store.run(repository.load_changes).values()
        return [each for each in changes if each.failure or is_surely_gone(each.worker)]

    # Plans and changes.

    def plan(self, device: str, layout: str) -> tuple[LayoutPlan, str]:
        """Plan a layout for a GPU (UUID or index).

        Returns the plan, and why it cannot be carried out now; empty if it can. Raises
        CannotDivide, InvalidRequest or Unavailable.
        """
        profiles = rules.parse_layout(layout)
        gpu = self._read(device)
        with self.store.read() as connection:
            records = repository.load_instances(connection, gpu.uuid)
            plan = rules.plan_layout(gpu, profiles, rules.own_instances(records, gpu, boot_id()))
            try:
                self._require_no_worker(connection, gpu)
                self._require_free(connection, gpu)
            except CannotDivide as refusal:
                return plan, refusal.message
        return plan, ""

    def apply(self, device: str, layout: str, *, actor: str, say: Say) -> LayoutPlan:
        """Give a drained, empty GPU a layout, or complete the change that was interrupted.

        Raises CannotDivide, InvalidRequest, ConfigError or Unavailable. What was done until then
        stays, and is recorded.
        """
        profiles = rules.parse_layout(layout)
        gpu = self._read(device)
        rules.require_mig_mode(gpu)
        with self._claimed(gpu, rules.format_layout(profiles), actor, self._require_free):
            gpu = self._read(gpu.uuid)  # nobody changes it any more
            with self.store.write() as connection:
                self._require_free(connection, gpu)
                records = repository.load_instances(connection, gpu.uuid)
                own = rules.own_instances(records, gpu, boot_id())
                plan = rules.plan_layout(gpu, profiles, own)
                new = rules.records_of(plan, records, own, boot_id())
                repository.replace_instances(connection, gpu.uuid, new)
            self._carry_out(gpu, say)
        return plan

    def restore(self, *, actor: str, say: Say) -> list[RestoredLayout]:
        """Make recorded instances that are missing, and complete interrupted changes.

        A GPU with an instance that is not recorded stays as it is. Raises Unavailable.
        """
        with self.store.read() as connection:
            every = repository.load_all_instances(connection)
            changes = repository.load_changes(connection)
        if not every and not changes:
            return []  # also on a machine without a driver
        self._require_nvml()
        states = {gpu.uuid: gpu for gpu in self.read_states(None)}
        found = []
        for uuid in sorted(every.keys() | changes.keys()):
            records = every.get(uuid, [])
            change = changes.get(uuid)
            layout = rules.format_layout(rules.wanted_profiles(records))
            result = RestoredLayout(uuid, layout)
            try:
                gpu = states.get(uuid)
                if gpu is None:
                    raise CannotDivide(f"The GPU {uuid} is not in this machine.")
                if change is not None or rules.is_gone(records, gpu, boot_id()):
                    self._restore_one(gpu, layout, actor, say)
                    result = replace(result, done=True)
            except (CannotDivide, Unavailable) as refusal:
                result = replace(result, refusal=refusal.message)
            found.append(result)
        return found

    def _restore_one(self, gpu: MIGState, layout: str, actor: str, say: Say) -> None:
        rules.require_mig_mode(gpu)
        with self._claimed(gpu, layout, actor, self._require_no_strangers):
            gpu = self._read(gpu.uuid)
            with self.store.write() as connection:
                self._require_no_strangers(connection, gpu)
                records = repository.load_instances(connection, gpu.uuid)
                again = rules.restored(records, gpu, boot_id())
                repository.replace_instances(connection, gpu.uuid, again)
            self._carry_out(gpu, say)

    # What must hold before a change.

    def _require_nvml(self) -> None:
        if self.source != "nvml":
            raise CannotDivide(
                f"The hub's devices come from {self.source}, and only the GPUs of this machine can "
                "be divided here. On a cluster, divide a node's GPUs on the node itself."
            )

    def _read(self, device: str) -> MIGState:
        self._require_nvml()
        return self.read_states(device)[0]

    def _require_free(self, connection: sa.Connection, gpu: MIGState) -> None:
        """Raise CannotDivide if the GPU is not drained or is in use."""
        if gpu.uuid not in closures.load(connection):
            raise CannotDivide(
                f"GPU {gpu.index} is not drained: gpuspawner drain {gpu.uuid} --reason MIG"
            )
        uuids = [uuid for instance in gpu.instances for uuid in instance.uuids]
        if leases := repository.leased_on(connection, gpu.uuid, uuids):
            raise CannotDivide(
                f"GPU {gpu.index} or an instance of it is leased ({', '.join(leases[:5])}). Wait "
                "until the sessions on it have ended; `gpuspawner leases` lists them."
            )
        if gpu.processes:
            named = ", ".join(f"{p.name or 'a process'} (pid {p.pid})" for p in gpu.processes[:5])
            raise CannotDivide(f"GPU {gpu.index} is used by {named}. End that first.")

    def _require_no_strangers(self, connection: sa.Connection, gpu: MIGState) -> None:
        """Raise CannotDivide if the GPU has an instance that gpuspawner did not make."""
        records = repository.load_instances(connection, gpu.uuid)
        if found := rules.strangers(records, gpu, boot_id()):
            ids = ", ".join(str(each.id) for each in found)
            raise CannotDivide(
                f"GPU {gpu.index} has instances that gpuspawner did not make (id {ids}), so its "
                "layout is not restored. To change it: gpuspawner mig apply."
            )

    def _require_no_worker(self, connection: sa.Connection, gpu: MIGState) -> MIGChange | None:
        """Return the interrupted change of a GPU, if any. Raises CannotDivide if one is running."""
        change = repository.load_changes(connection).get(gpu.uuid)
        if change is None or change.failure or is_surely_gone(change.worker):
            return change
        age = self.clock() - change.stepped_at
        if age > timedelta(seconds=devices_repository.HELD_SECONDS):
            return change  # its steps are refused from now on
        raise CannotDivide(
            f"GPU {gpu.index} is being changed to {change.layout} by {describe(change.worker)}. "
            "Wait until that is done."
        )

    @contextmanager
    def _claimed(
        self,
        gpu: MIGState,
        layout: str,
        actor: str,
        require: Callable[[sa.Connection, MIGState], None],
    ) -> Iterator[None]:
        """Make this process the only one that changes the GPU, if ``require`` allows it.

        If the work fails, the change stays in the store with the reason, for the next process.
        """
        now = self.clock()
        with self.store.write() as connection:
            before = self._require_no_worker(connection, gpu)
            require(connection, gpu)
            change = MIGChange(gpu.uuid, layout, now, now, this_process())
            repository.put_change(connection, change)
            recorded = repository.load_instances(connection, gpu.uuid)
            self._note(connection, actor, gpu, f"{layout}: begun")
        try:
            self._await_command(gpu)
            yield
        except BaseException as error:
            why = error.message if isinstance(error, GPUSpawnerError) else type(error).__name__
            with self.store.write() as connection:
                values = {"failure": why.rstrip(".")}
                if repository.touch_change(connection, gpu.uuid, this_process(), values):
                    self._note(connection, actor, gpu, f"{layout}: stopped: {why}")
                    untouched = repository.load_instances(connection, gpu.uuid) == recorded
                    if before is None and untouched:
                        repository.end_change(connection, gpu.uuid)
            raise
        with self.store.write() as connection:
            repository.end_change(connection, gpu.uuid)
            self._note(connection, actor, gpu, f"{layout}: done")

    def _await_command(self, gpu: MIGState) -> None:
        """Wait for a command that a killed process left behind. Raises CannotDivide."""
        end = time.monotonic() + COMMAND_SECONDS
        while found := find_by_words("mig", "-i", gpu.uuid):
            if time.monotonic() > end:
                raise CannotDivide(
                    f"Another command still changes GPU {gpu.index} (pid {found[0]}). Wait until "
                    "it has ended, or end it."
                )
            time.sleep(0.1)

    def _note(self, connection: sa.Connection, actor: str, gpu: MIGState, detail: str) -> None:
        audit_log.note(
            connection,
            at=self.clock(),
            actor=actor,
            action="mig",
            subject=gpu.uuid,
            detail=detail,
        )

    # The steps.

    def _carry_out(self, gpu: MIGState, say: Say) -> None:
        """Destroy and make instances as recorded. Each step can be repeated."""
        records = self._pending(gpu)
        if records:
            self._await_release(say)
        while records:
            record = records[0]
            if record.state is RecordState.UNWANTED:
                self._destroy(gpu, record, say)
            else:
                self._create(gpu, record, say)
            records = self._pending(gpu)

    def _pending(self, gpu: MIGState) -> list[RecordedInstance]:
        with self.store.read() as connection:
            records = repository.load_instances(connection, gpu.uuid)
        return [each for each in records if each.state is not RecordState.MADE]

    def _await_release(self, say: Say) -> None:
        """Wait until our other processes have closed NVML, but not for ever."""
        end = time.monotonic() + self.release_seconds
        while others := self._nvml_clients():
            if time.monotonic() > end:
                named = ", ".join(map(describe, others))
                say(
                    f"NVML is still open in {named} after {self.release_seconds:.0f} seconds. If "
                    "the driver refuses a step for that, stop the hub and try again."
                )
                return
            time.sleep(0.1)

    def _nvml_clients(self) -> list[str]:
        every = self.store.run(devices_repository.load_nvml_clients)
        return [each for each in every if each != this_process() and not is_surely_gone(each)]

    def _destroy(self, gpu: MIGState, record: RecordedInstance, say: Say) -> None:
        said = ""
        if found := self._find(gpu, record):
            number = str(found.id)
            if found.uuids:
                said = self._run(gpu, "-dci", "-gi", number)
            said = self._run(gpu, "-dgi", "-gi", number) or said
            if self._find(gpu, record):
                raise CannotDivide(_not_done(gpu, f"{record.name} was not destroyed", said))
            say(f"Destroyed {record.name}.")
        with self._step(gpu) as connection:
            repository.delete_instance(connection, record)

    def _create(self, gpu: MIGState, record: RecordedInstance, say: Say) -> None:
        said = ""
        found = self._find(gpu, record)
        if found is None:
            self._require_place(gpu, record)
            record = replace(record, state=RecordState.BEGUN)
            with self._step(gpu) as connection:
                repository.update_instance(connection, record)
            said = self._run(gpu, "-cgi", f"{record.profile_id}:{record.placement.start}", "-C")
            found = self._find(gpu, record)
        if found is not None and not found.uuids:  # it is of no use without a compute instance
            said = self._run(gpu, "-cci", "-gi", str(found.id)) or said
            found = self._find(gpu, record)
        if found is None or not found.uuids:
            raise CannotDivide(_not_done(gpu, f"{record.name} was not made", said))
        uuid = found.uuids[0]
        made = replace(record, state=RecordState.MADE, instance_id=found.id, uuid=uuid)
        with self._step(gpu) as connection:
            repository.update_instance(connection, made)
        say(f"Made {record.name}: {uuid}.")

    def _find(self, gpu: MIGState, record: RecordedInstance) -> MIGInstance | None:
        return rules.find_instance(record, self._read(gpu.uuid), boot_id())

    def _require_place(self, gpu: MIGState, record: RecordedInstance) -> None:
        now = self._read(gpu.uuid)
        rules.require_known(record, now)
        if hit := [x for x in now.instances if x.placement.overlaps(record.placement)]:
            raise CannotDivide(
                f"{record.name} was not made: an instance that gpuspawner did not make (id "
                f"{hit[0].id}) is in its place by now. Plan the layout again."
            )

    @contextmanager
    def _step(self, gpu: MIGState) -> Iterator[sa.Connection]:
        """Write a step, unless another process has taken the change over."""
        with self.store.write() as connection:
            values = {"stepped_at": self.clock()}
            if not repository.touch_change(connection, gpu.uuid, this_process(), values):
                raise CannotDivide(f"Another process has taken over the change of GPU {gpu.index}.")
            yield connection

    def _run(self, gpu: MIGState, *words: str) -> str:
        """Run the command on a GPU, and return its output. Only NVML shows whether it worked."""
        with self._step(gpu):
            pass
        command = [*self.settings.mig_command, "mig", "-i", gpu.uuid, *words]
        self.log.info("Running %s", " ".join(command))
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=COMMAND_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"{command[0]} did not end within {COMMAND_SECONDS:.0f} seconds"
        except OSError as error:
            raise ConfigError(
                f"{command[0]} cannot be run ({error.strerror}). Set c.GPUSharing.mig_command to "
                'how nvidia-smi is run as root, such as ["sudo", "-n", "nvidia-smi"].'
            ) from None
        said = " ".join((done.stdout + " " + done.stderr).split())
        return said[-400:] if done.returncode else ""


def _not_done(gpu: MIGState, what: str, said: str) -> str:
    """Return the sentence about a step that had no effect, with what the command said."""
    answer = f": {said.rstrip('.')}" if said else ", and the command reported no error"
    advice = "What was done so far is recorded; run the same command again to continue."
    if "in use" in said.lower():
        advice += (
            f" See who uses the GPU with: fuser -v /dev/nvidia{gpu.index}. A monitoring agent such "
            "as dcgm-exporter counts too."
        )
    elif "permission" in said.lower():
        advice += " Run it as root, or set c.GPUSharing.mig_command."
    return f"{what}{answer}. {advice}"
