"""Looks for secrets in what git keeps, by detect-secrets. Exit status 1, and where they are.

In tests there are passwords for tests, which look like any other, and scripts that a program built
are full of hashes: there only what has the form of a known service's key, or of a private key, is
looked for.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
PROGRAM = Path(sys.executable).with_name("detect-secrets")

GUESSES = (
    "Base64HighEntropyString",
    "BasicAuthDetector",
    "HexHighEntropyString",
    "KeywordDetector",
)
"""Plugins that guess from how random a text is, or from the name before it."""

NO_SECRETS = (
    "^PASSWORD$",  # of an address that a message shows
    "^abcdefghijkmnpqrstuvwxyz23456789$",  # the letters of the demo's passwords
    "^at-least-8-characters$",  # what an example says of a password
    "^another-one-of-at-least-32-characters$",
    "^eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJhZGEifQ.",  # a token that a test looks for in logs
    "^sha512-",  # the hash of a package of npm
    "^gpuspawner.auth:",  # entry points with "password" in their names
)
LOCKED = (".lock", ".svg", ".png", ".ico", ".woff2")
"""Hashes and pictures."""
FULL = ("tests/", "images/common/lab/share/")
"""Folders that are full of what looks like a secret."""


def scan(files: list[str], without: tuple[str, ...] = (), folder: Path = REPO) -> list[str]:
    """Where something in files of a folder looks like a secret."""
    command = [
        str(PROGRAM),
        "scan",
        "--all-files",
        *(f"--exclude-secrets={text}" for text in NO_SECRETS),
    ]
    for plugin in without:
        command += ["--disable-plugin", plugin]
    done = subprocess.run(
        [*command, *files], cwd=folder, stdout=subprocess.PIPE, text=True, check=True
    )
    results = json.loads(done.stdout)["results"]
    return [
        f"{name}:{found['line_number']}: {found['type']}"
        for name, several in sorted(results.items())
        for found in several
    ]


def main() -> int:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=REPO, stdout=subprocess.PIPE, text=True, check=True
    )
    files = [name for name in listed.stdout.splitlines() if (REPO / name).is_file()]
    files = [name for name in files if not name.endswith(LOCKED)]
    full = [name for name in files if name.startswith(FULL)]
    found = scan([name for name in files if name not in full]) + scan(full, without=GUESSES)
    for line in found:
        print(line)
    if found:
        print(
            "Take the secret out and change it wherever it counts; if it is none, add it to "
            "NO_SECRETS in scripts/scan_secrets.py."
        )
    else:
        print(f"No secret in {len(files)} files.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
