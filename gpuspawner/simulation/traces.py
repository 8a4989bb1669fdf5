"""Traces: jobs of the past, from a CSV file."""

from __future__ import annotations

import csv
import gzip
import math
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path

from .replay import Job

REQUIRED = ("timestamp", "duration", "num_gpus")
"""Columns that a trace must have; ``cluster`` or ``group``, ``member`` and ``seconds`` may be."""

_MOST_DEVICES = 1_000_000
_MOST_SECONDS = 100 * 365 * 86400.0


class TraceError(ValueError):
    """The trace cannot be read; the sentence says which line and what is wrong with it."""


def read_trace(path: str | Path) -> list[Job]:
    """The jobs of a CSV file (``.gz`` is unpacked), in the order in which they were asked for.

    Columns: ``timestamp`` (``2017-10-09 07:01:55``, UTC where no zone is given, or seconds since
    1970), ``duration`` in seconds, ``num_gpus``; ``cluster`` or ``group``, ``member`` and
    ``seconds`` (the session length asked for) where there are such. Others are ignored. Raises
    TraceError.
    """
    path = Path(path)
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8", newline="") as file:
            return parse_trace(file, path.name)
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path.name} cannot be read: {error}.") from error


def parse_trace(lines: Iterable[str], name: str = "the trace") -> list[Job]:
    """The same from lines of text."""
    jobs = sorted(_jobs(lines, name), key=lambda job: job.asked_at)
    if not jobs:
        raise TraceError(f"{name} has no jobs: there is nothing to replay.")
    return jobs


def _jobs(lines: Iterable[str], name: str) -> Iterator[Job]:
    reader = csv.DictReader(lines)
    missing = [column for column in REQUIRED if column not in (reader.fieldnames or ())]
    if missing:
        raise TraceError(
            f"{name} has no column {missing[0]!r} in its first line; it needs "
            f"{', '.join(REQUIRED)}, and may have group (or cluster), member and seconds."
        )
    for row in reader:
        try:
            yield _job(row)
        except ValueError as error:
            raise TraceError(f"{name}, line {reader.line_num}: {error}.") from error


def _job(row: Mapping[str, str | None]) -> Job:
    for column in REQUIRED:
        if not (row.get(column) or "").strip():
            raise ValueError(f"{column} is missing")
    devices = _number(row, "num_gpus", 1, _MOST_DEVICES)
    if devices != int(devices):
        raise ValueError(f"num_gpus is {row['num_gpus']!r}; it is a whole number")
    seconds = row.get("seconds")
    return Job(
        asked_at=_moment(row["timestamp"] or ""),
        duration=_number(row, "duration", 0, _MOST_SECONDS),
        devices=int(devices),
        member=row.get("member") or "",
        group=row.get("group") or row.get("cluster") or "",
        seconds=_number(row, "seconds", 1, _MOST_SECONDS) if seconds else None,
    )


def _number(row: Mapping[str, str | None], column: str, least: float, most: float) -> float:
    text = (row[column] or "").strip()
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:  # also when it is not a number
        raise ValueError(f"{column} is {text!r}; it is a number from {least:g} to {most:g}")
    return value


def _moment(text: str) -> float:
    """Seconds since 1970."""
    try:
        value = float(text)
    except ValueError:
        pass
    else:
        if not 0 <= value < 1e11:
            raise ValueError(f"timestamp is {text!r}; in seconds since 1970 that is no date")
        return value
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ValueError(
            f"timestamp is {text!r}; write 2017-10-09 07:01:55 or seconds since 1970"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    return moment.timestamp()
