"""``gpuspawner audit``: do the books add up, to the last row?"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from ..store.invariants import Finding
from .config import Settings
from .output import count, printable, show

UNKNOWN_HEAD = "rows up to it were changed or deleted by hand, or it is of another database."


def audit(arguments: argparse.Namespace, settings: Settings) -> int:
    """Hold every invariant against every row; 1 when one is broken.

    Also 1 when the chain does not have the head that was noted earlier.
    """
    broker, noted = settings.open_broker(), arguments.head
    with broker.store.view():
        findings, rows = broker.audit()
        head = broker.chain_head() if holds(findings) else ""
        known = not (noted and head) or broker.knows_head(noted)
    value = plain(findings, rows) | {"head": head or None}
    said = text(findings, rows)
    if head:
        said += f"\nHead of the audit chain, to be kept elsewhere: {head}"
    if noted:
        value["knows_head"] = known
        if not known:
            said += f"\nThe chain does not have the head {printable(noted)}: {UNKNOWN_HEAD}"
    show(arguments.json, value, said)
    return 0 if holds(findings) and known else 1


def holds(findings: Sequence[Finding]) -> bool:
    """Whether every invariant does."""
    return not any(finding.problem for finding in findings)


def plain(findings: Sequence[Finding], rows: Mapping[str, int]) -> dict[str, Any]:
    """The findings for scripts."""
    return {
        "ok": holds(findings),
        "rows": dict(rows),
        "invariants": [
            {"name": f.name, "law": f.law, "ok": not f.problem, "problem": f.problem or None}
            for f in findings
        ],
    }


def text(findings: Sequence[Finding], rows: Mapping[str, int]) -> str:
    """The findings for people: each law, and under a broken one the first row that breaks it."""
    lines = []
    for finding in findings:
        lines.append(f"{'BROKEN' if finding.problem else 'ok':6}  {finding.law}")
        if finding.problem:
            lines.append(f"        {printable(finding.problem)}")
    broken = sum(bool(finding.problem) for finding in findings)
    looked_at = ", ".join(f"{number} {name}" for name, number in rows.items())
    if broken:
        said = f"{count(broken, 'invariant')} broken; the first row of each is named above."
    else:
        said = "Every invariant holds."
    return "\n".join([*lines, "", f"{said} Rows: {looked_at}."])
