"""``gpuspawner mig``: divides GPUs into MIG instances, and restores them at boot."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..cli.command import group
from ..cli.config import Settings
from ..cli.output import actor, confirmed, local, note, show, table, utc
from ..cli.parameters import argument, yes_option
from ..devices.models import MIGInstance, MIGState
from .models import LayoutPlan, MIGChange, RecordedInstance, RecordState, place_name
from .service import RestoredLayout

device_argument = argument("device", "DEVICE", "the GPU's index or UUID")
layout_argument = argument(
    "layout", "LAYOUT", "MIG profiles such as 3g.20gb,2x1g.5gb, or none for no instances"
)

STATES = {
    RecordState.WANTED: "to be made",
    RecordState.BEGUN: "to be made",
    RecordState.MADE: "made by gpuspawner",
    RecordState.UNWANTED: "to be destroyed",
}


@group()
def mig(settings: Settings) -> None:
    """Show each GPU's recorded layout and the instances that exist."""
    settings.require_configuration("where the devices are")
    found = settings.open_services().mig.show()
    text = "\n\n".join(_shown(*each) for each in found) or "No GPUs."
    show([_plain_shown(*each) for each in found], text)


mig.add_same("show", "Show each GPU's recorded layout and the instances that exist.")


@mig.command("plan")
@device_argument
@layout_argument
def plan_layout(settings: Settings, device: str, layout: str) -> int:
    """Show the steps to a layout, or why it is not possible. Changes nothing."""
    settings.require_configuration("where the devices are")
    plan, obstacle = settings.open_services().mig.plan(device, layout)
    text = _steps(plan)
    if obstacle:
        text += f"\n\nNot now: {obstacle}"
    show(_plain_plan(plan) | {"obstacle": obstacle}, text)
    return 1 if obstacle else 0


@mig.command("apply")
@device_argument
@layout_argument
@yes_option
def apply_layout(settings: Settings, device: str, layout: str, yes: bool) -> int:
    """Give a drained, empty GPU a layout, or complete an interrupted change."""
    settings.require_configuration("where the devices are")
    services = settings.open_services()
    if not yes:
        plan, obstacle = services.mig.plan(device, layout)
        note(_steps(plan))
        if obstacle:
            note(f"\nNot now: {obstacle}")
            return 1
        if not confirmed("Go on?"):
            note("Nothing was changed.")
            return 1
    plan = services.mig.apply(device, layout, actor=actor(), say=note)
    text = f"GPU {plan.gpu.index} has the layout {plan.layout}."
    if plan.gpu.uuid in services.devices.closures():
        text += f" Return it to service: gpuspawner undrain {plan.gpu.uuid}"
    show(_plain_plan(plan), text)
    return 0


@mig.command("restore")
def restore_layouts(settings: Settings) -> int:
    """Make recorded instances that are missing, such as after a restart of the machine."""
    settings.require_configuration("where the devices are")
    # Before its first start, the hub has no database.
    is_new = settings.missing_database() is not None
    found = [] if is_new else settings.open_services().mig.restore(actor=actor(), say=note)
    text = "\n".join(map(_restored, found)) or "No layouts are recorded."
    show([_plain_restored(each) for each in found], text)
    return 1 if any(each.refusal for each in found) else 0


# Plans.


def _steps(plan: LayoutPlan) -> str:
    gpu = plan.gpu
    lines = [f"GPU {gpu.index} ({gpu.model}): {plan.layout}"]
    lines += [f"  keep     {_named(gpu, each)}" for each in plan.keep]
    lines += [f"  destroy  {_named(gpu, each)}" for each in plan.destroy]
    lines += [f"  make     {each.name}" for each in plan.create]
    lines += [f"  beside   {_named(gpu, each)}, not made by gpuspawner" for each in plan.beside]
    if not plan.destroy and not plan.create:
        lines.append("Nothing is to be made or destroyed.")
    return "\n".join(lines)


def _named(gpu: MIGState, instance: MIGInstance) -> str:
    uuids = "".join(f" {uuid}" for uuid in instance.uuids)
    return f"{_place(gpu, instance)} (id {instance.id}){uuids}"


def _place(gpu: MIGState, instance: MIGInstance) -> str:
    names = {profile.id: profile.name for profile in gpu.profiles}
    name = names.get(instance.profile_id, f"profile {instance.profile_id}")
    return place_name(name, instance.placement)


def _plain_plan(plan: LayoutPlan) -> dict[str, Any]:
    return {
        "gpu": plan.gpu.uuid,
        "layout": plan.layout,
        "keep": _plain_instances(plan.gpu, plan.keep),
        "destroy": _plain_instances(plan.gpu, plan.destroy),
        "create": [
            {
                "profile": each.profile.name,
                "start": each.placement.start,
                "size": each.placement.size,
            }
            for each in plan.create
        ],
        "beside": _plain_instances(plan.gpu, plan.beside),
    }


def _plain_instances(gpu: MIGState, instances: Iterable[MIGInstance]) -> list[dict[str, Any]]:
    names = {profile.id: profile.name for profile in gpu.profiles}
    return [
        {
            "id": each.id,
            "profile": names.get(each.profile_id, ""),
            "start": each.placement.start,
            "size": each.placement.size,
            "uuids": list(each.uuids),
        }
        for each in instances
    ]


# What is recorded and what exists.


def _shown(gpu: MIGState, records: list[RecordedInstance], change: MIGChange | None) -> str:
    mode = "in MIG mode" if gpu.is_enabled else "not in MIG mode"
    lines = [f"GPU {gpu.index} ({gpu.model}, {gpu.uuid}): {mode}"]
    if change is not None:
        state = f"stopped: {change.failure}" if change.failure else "not complete"
        lines.append(f"Its change to {change.layout} of {local(change.started_at)} is {state}.")
    there = {each.placement: each for each in gpu.instances}
    rows = []
    for record in records:
        found = there.pop(record.placement, None)
        exists = ", ".join(found.uuids) or f"id {found.id}" if found else "missing"
        rows.append((record.name, STATES[record.state], exists))
    rows += [
        (_place(gpu, each), "made by somebody else", ", ".join(each.uuids) or f"id {each.id}")
        for each in there.values()
    ]
    if rows:
        lines.append(table(("INSTANCE", "RECORD", "EXISTS"), rows))
    return "\n".join(lines)


def _plain_shown(
    gpu: MIGState, records: list[RecordedInstance], change: MIGChange | None
) -> dict[str, Any]:
    return {
        "gpu": gpu.uuid,
        "index": gpu.index,
        "mig_mode": gpu.is_enabled,
        "recorded": [
            {
                "state": each.state.value,
                "profile": each.profile,
                "start": each.placement.start,
                "size": each.placement.size,
                "uuid": each.uuid,
            }
            for each in records
        ],
        "instances": _plain_instances(gpu, gpu.instances),
        "change": change
        and {
            "layout": change.layout,
            "started_at": utc(change.started_at),
            "failure": change.failure,
        },
    }


def _restored(found: RestoredLayout) -> str:
    if found.refusal:
        return f"{found.gpu_uuid}: {found.layout} is not complete. {found.refusal}"
    state = "is restored" if found.done else "is complete"
    return f"{found.gpu_uuid}: {found.layout} {state}."


def _plain_restored(found: RestoredLayout) -> dict[str, Any]:
    return {
        "gpu": found.gpu_uuid,
        "layout": found.layout,
        "restored": found.done,
        "refusal": found.refusal,
    }
