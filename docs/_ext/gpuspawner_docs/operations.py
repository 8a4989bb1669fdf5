"""Scopes, metrics, alerts, and the causes for which a GPU counts as sick."""

from __future__ import annotations

import inspect
import re
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import yaml
from sphinx.pycode import ModuleAnalyzer

from .page import Generated, block, plain, table

REPO = Path(__file__).resolve().parents[3]
ALERTS = REPO / "hub_config" / "alerts.yaml"


def documented_constant(module: str, name: str) -> str:
    """Return the docstring below a constant."""
    lines = ModuleAnalyzer.for_module(module).find_attr_docs()["", name]
    return inspect.cleandoc("\n".join(lines)).strip()


# Scopes.


class Scopes(Generated):
    """``{scopes}``: a section for each scope that gpuspawner defines."""

    def markdown(self) -> Iterator[str]:
        """Yield the sections, with the routes that need the scope."""
        from gpuspawner.core import scopes

        from .rest import name_of
        from .rest import scopes as asked

        self.uses(scopes)
        for name, told in scopes.CUSTOM_SCOPES.items():
            yield from self.heading(1, "scope", name)
            yield f"{plain(str(told['description']))}."
            subscopes = told.get("subscopes", ())
            if isinstance(subscopes, list) and subscopes:
                yield f"It includes {', '.join(f'{{scope}}`{each}`' for each in subscopes)}."
            yield ""
            found = [operation for operation, of in asked().items() if of == name]
            routes = [name_of(path, method) for method, path in found]
            if routes:
                yield f"Routes: {', '.join(f'{{route}}`{route}`' for route in routes)}."
            yield ""


class Roles(Generated):
    """``{roles}``: what each service, member and server may do."""

    def markdown(self) -> Iterator[str]:
        """Yield a table."""
        from gpuspawner.core import scopes

        self.uses(scopes)
        rows = []
        for who, name in (
            ("the accounting service", "ACCOUNTING_SCOPES"),
            ("the idle culler", "CULLER_SCOPES"),
            ("each member", "MEMBER_SCOPES"),
            ("each server", "SERVER_SCOPES"),
        ):
            held = ", ".join(f"`{scope}`" for scope in getattr(scopes, name))
            told = documented_constant(scopes.__name__, name).partition("\n\n")[2]
            rows.append((who, held, plain(told) if name != "MEMBER_SCOPES" else ""))
        yield from table(("Who", "Scopes", "To do what"), rows)


# Metrics.


@cache
def metrics() -> tuple[SimpleNamespace, ...]:
    """Return every metric that the service serves: on an empty database, with a simulated GPU."""
    from traitlets.config import Config

    from gpuspawner.monitoring.metrics import HubCollector
    from gpuspawner.services import Services

    with tempfile.TemporaryDirectory() as folder:
        config = Config()
        config.GPUDatabase.url = f"sqlite:///{folder}/metrics.sqlite"
        config.GPUDevices.source = "simulated:1xT4"
        config.GPUHost.memory = config.GPUHost.cpus = "auto"
        config.GPUHost.system_memory, config.GPUHost.system_cpus = "1M", 0.5
        services = Services(config=config)
        try:
            # The metrics of batch jobs have series only where there is a cluster.
            job = SimpleNamespace(seconds=1.0, jobs=1)
            with mock.patch.object(services.reports, "use_of_all_jobs", return_value={"T4": job}):
                found = list(HubCollector(services).collect())
        finally:
            services.store.close()
    return tuple(
        SimpleNamespace(
            name=each.name + ("_total" if each.type == "counter" else ""),
            type=each.type,
            documentation=each.documentation,
            labels=tuple(getattr(each, "_labelnames", ()) or ()),
        )
        for each in found
    )


class Metrics(Generated):
    """``{metrics}``: a section for each metric."""

    def markdown(self) -> Iterator[str]:
        """Yield the sections."""
        from gpuspawner.monitoring import metrics as module

        self.uses(module)
        rules = list(alerts())
        for each in metrics():
            yield from self.heading(1, "metric", each.name)
            yield f"{plain(each.documentation)}."
            labels = ", ".join(f"`{label}`" for label in each.labels) or "none"
            yield from ("", f"Type: {each.type}. Labels: {labels}.")
            used = [rule["alert"] for rule in rules if re.search(rf"\b{each.name}\b", rule["expr"])]
            if used:
                yield f"Alerts: {', '.join(f'{{alert}}`{name}`' for name in used)}."
            yield ""


# Alerts.


def alerts() -> Iterator[dict[str, Any]]:
    """Yield the rules of the file for Prometheus."""
    for group in yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]:
        yield from group["rules"]


class Alerts(Generated):
    """``{alerts}``: a section for each alert."""

    def markdown(self) -> Iterator[str]:
        """Yield the sections."""
        self.env.note_dependency(str(ALERTS))
        for rule in alerts():
            yield from self.heading(1, "alert", rule["alert"])
            notes = rule["annotations"]
            yield from (f"{plain(notes['summary'])}.", "", plain(notes["description"]), "")
            lasting = f", if it lasts {rule['for']}" if "for" in rule else ""
            yield from (f"Severity: {rule['labels']['severity']}{lasting}.", "")
            yield from block("text", rule["expr"])


# Causes for which a GPU is watched or drained.


class Causes(Generated):
    """``{health-causes}``: what can be wrong with a GPU, and what is done about it."""

    def markdown(self) -> Iterator[str]:
        """Yield the table of causes, then the driver's errors of each class."""
        from gpuspawner.monitoring import health

        self.uses(health)
        causes = health.CAUSES.items()
        rows = ((f"`{name}`", f"`{act}`", plain(what)) for name, (act, what) in causes)
        yield from table(("Cause", "Default action", "Meaning"), rows)
        yield from ("", "The driver reports errors by number (Xid):", "")
        yield from table(
            ("Cause", "Xid"),
            (
                (f"`{each.cause}`", ", ".join(map(str, each.codes)) or "all others")
                for each in health.XIDS
            ),
        )
