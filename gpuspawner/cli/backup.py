"""``gpuspawner backup`` and ``restore``: a copy of the database, and the way back from one."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from ..store import backup as copies
from .config import Settings, shown_url
from .output import count, show


def backup(arguments: argparse.Namespace, settings: Settings) -> int:
    """Copy the database into a file, while the hub goes on."""
    store = settings.open_broker().store
    file = Path(arguments.file)
    size = copies.back_up(store, file, overwrite=arguments.overwrite)
    text = f"Copied the database to {file} ({size / 1_000_000:.1f} MB, for its owner only)."
    text += f" Prove it with: gpuspawner restore --check {file}"
    head = copies.head(file)
    text += f"\nHead of its audit chain, to be kept elsewhere: {head}"
    show(arguments.json, {"file": str(file), "bytes": size, "head": head}, text)
    return 0


def restore(arguments: argparse.Namespace, settings: Settings) -> int:
    """Prove a copy, and put it in the place of the database."""
    file = Path(arguments.file)
    if arguments.check:
        rows = copies.check(file)
        text = f"{file} can be restored: every invariant holds ({_looked_at(rows)})."
        show(arguments.json, {"file": str(file), "rows": rows, "restored": False}, text)
        return 0
    done = copies.restore(settings.database_url, file, overwrite=arguments.overwrite)
    where = shown_url(settings.database_url)
    text = f"Restored {file} to {where}: every invariant holds ({_looked_at(done.rows)})."
    if done.kept:
        text += f" What was there before is kept: {done.kept}"
    value = {"file": str(file), "rows": done.rows, "restored": True, "kept": done.kept or None}
    show(arguments.json, value, text)
    return 0


def _looked_at(rows: Mapping[str, int]) -> str:
    return ", ".join(count(number, name.removesuffix("s")) for name, number in rows.items())
