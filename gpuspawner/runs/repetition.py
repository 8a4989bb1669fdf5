"""The form that runs something again with other parameters."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..core.errors import InvalidRequest
from ..leases.models import SHARE
from ..web.fields import invalid
from .models import FollowedRun, Run
from .schemas import INPUT_NAME, RunBody

MOST_PARAMETERS = 100


@dataclass(frozen=True, slots=True)
class Repetition:
    """The values of the form: typed ones, or those of an earlier run."""

    title: str
    command: str
    """The program and its arguments, quoted as in a shell; empty for a notebook."""
    parameters: tuple[tuple[str, str], ...]
    """Names and values, as JSON or as plain text."""
    gpus: str
    hours: str

    @classmethod
    def of_run(cls, run: Run) -> Repetition:
        """Return the form of a run as it was submitted."""
        return cls(
            title=run.title,
            command=shlex.join(run.work.command),
            parameters=tuple((name, shown(value)) for name, value in run.work.parameters.items()),
            gpus=shown(run.options.get("gpus", "")),
            hours=shown(run.options.get("hours", "")),
        )

    @classmethod
    def typed(cls, field: Callable[[str], str]) -> Repetition:
        """Return what was typed; ``field`` gives the text of a field, or an empty one."""
        pairs = ((field(f"name{i}").strip(), field(f"value{i}")) for i in range(MOST_PARAMETERS))
        return cls(
            title=field("title"),
            command=field("command"),
            parameters=tuple(pair for pair in pairs if pair[0] or pair[1].strip()),
            gpus=field("gpus").strip(),
            hours=field("hours").strip(),
        )

    def as_fields(self) -> dict[str, str]:
        """Return the fields of the form."""
        told = {"title": self.title, "command": self.command}
        for number, (name, value) in enumerate(self.parameters):
            told |= {f"name{number}": name, f"value{number}": value}
        return told | {"gpus": self.gpus, "hours": self.hours}

    def body(self, followed: FollowedRun, key: str) -> RunBody:
        """Return the submission of a run like an earlier one, with the values of this form.

        Its notebook is the copy that the earlier run made when it started. Raises InvalidRequest
        with a sentence that names the field.
        """
        run, lease = followed.run, followed.lease
        has_copy = lease is not None and lease.started_at is not None
        notebook = f"{run.work.folder}/{INPUT_NAME}" if has_copy else run.work.notebook
        named = [name for name, _ in self.parameters]
        for name, _ in self.parameters:
            if not name.isidentifier():
                raise InvalidRequest(
                    f"{name[:60]!r} is not a valid parameter name: use letters, digits and _.",
                    field="parameters",
                )
            if named.count(name) > 1:
                raise InvalidRequest(f"The parameter {name} is given twice.", field="parameters")
        sent: dict[str, Any] = {
            "title": self.title,
            "notebook": notebook if run.work.notebook else "",
            "parameters": {name: parsed(value) for name, value in self.parameters},
            "command": self._words() if run.work.command else [],
            "directory": run.work.directory,
            "options": self._options(run.options),
            "requeue": run.requeue,
            "preemptible": run.preemptible,
        }
        return RunBody.model_validate(sent | ({"key": key} if key else {}))

    def _words(self) -> list[str]:
        try:
            words = shlex.split(self.command)
        except ValueError:
            raise invalid("command", "is not valid: a quotation mark is not closed.") from None
        if not words:
            raise invalid("command", "is empty: write a program and its arguments.")
        return words

    def _options(self, before: Mapping[str, Any]) -> dict[str, Any]:
        options = {name: value for name, value in before.items() if name not in ("gpus", "hours")}
        options.pop("shown_at", None)  # the current prices apply
        if self.gpus:
            options["gpus"] = _gpus(self.gpus)
        if self.hours:
            try:
                hours = float(self.hours)
            except ValueError:
                hours = math.nan
            if not 0 < hours < 10_000:
                raise invalid("hours", f"is {self.hours[:20]!r}: write hours, such as 1.5.")
            options["hours"] = hours
        return options


def _gpus(text: str) -> int | str:
    if text == SHARE:
        return text
    if not (text.isascii() and text.isdigit() and len(text) < 5):
        what = f"is {text[:20]!r}: write a whole number, such as 1, or {SHARE} for a share."
        raise invalid("gpus", what)
    return int(text)


def parsed(value: str) -> Any:
    """Return a parameter parsed as JSON, or the text if it is not JSON."""
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return value if isinstance(found, float) and not math.isfinite(found) else found


def shown(value: Any) -> str:
    """Return the text that :func:`parsed` reads as this value."""
    if isinstance(value, str) and parsed(value) == value:
        return value
    return json.dumps(value, ensure_ascii=False)
