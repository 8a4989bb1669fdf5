"""Asks whether what is installed has known vulnerabilities, by pip-audit.

It needs the network. Exit status 1: there is a vulnerability. Exit status 2: some package could not
be audited, so nothing is known.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

PROGRAM = Path(sys.executable).with_name("pip-audit")
PATIENCE = 120
"""Seconds for all of it."""
OURS = "gpuspawner"

NOT_AUDITED = 2
"""Exit status."""


def report(answer: dict[str, Any]) -> tuple[int, list[str]]:
    """Exit status and lines for what pip-audit found, as its JSON says it."""
    packages = [each for each in answer["dependencies"] if each["name"] != OURS]
    audited = [each for each in packages if "skip_reason" not in each]
    lines = [
        f"{each['name']} {each['version']}: {found['id']}, fixed in "
        f"{', '.join(found['fix_versions']) or 'no version yet'}"
        for each in audited
        for found in each["vulns"]
    ]
    if lines:
        return 1, [
            *lines,
            "Ask for a fixed version in setup.cfg.",
        ]
    if not audited:
        return NOT_AUDITED, [
            f"NOT AUDITED: none of {len(packages)} packages could be looked up from here."
        ]
    lines.append(f"No known vulnerability in {len(audited)} packages.")
    if left := [each["name"] for each in packages if each not in audited]:
        lines.append(f"NOT AUDITED: {len(left)} packages: {', '.join(left[:20])}")
        return NOT_AUDITED, lines
    return 0, lines


def main() -> int:
    command = [str(PROGRAM), "--format=json", "--progress-spinner=off", "--timeout=10"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        answer = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        print(f"NOT AUDITED: there was no answer within {PATIENCE} s.")
        return NOT_AUDITED
    except ValueError:
        print(f"NOT AUDITED: {done.stderr.strip().splitlines()[-1:] or 'it said nothing'}")
        return NOT_AUDITED
    code, lines = report(answer)
    print("\n".join(lines))
    return code


if __name__ == "__main__":
    sys.exit(main())
