"""Scripts of ours find what they look for. Real: detect-secrets and files; no network."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.audit_dependencies import report
from scripts.scan_secrets import GUESSES, scan

KEY = "".join(("AKIA", "IOSFODNN7", "QAZWSXE"))  # nobody's
PASSWORD = "".join(("password = ", '"hunter', '2-and-more"'))


@pytest.mark.parametrize(
    ("text", "without", "found"),
    [
        (f"key = {KEY}", GUESSES, ["AWS Access Key"]),
        ("-----BEGIN " + "RSA PRIVATE KEY-----", GUESSES, ["Private Key"]),
        (PASSWORD, (), ["Secret Keyword"]),
        (PASSWORD, GUESSES, []),
        ("nothing = here", (), []),
    ],
)
def test_secret_scan_reports_secrets_with_their_line(
    text: str, without: tuple[str, ...], found: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "settings.py"
    file.write_text(f"{text}\n")
    lines = scan([file.name], without, tmp_path)
    assert [line.rpartition(": ")[2] for line in lines] == found
    assert all(":1: " in line for line in lines)


def test_audit_reports_packages_that_were_not_checked() -> None:
    lost = {"name": "lost", "skip_reason": "not found"}
    well = {"name": "well", "version": "1", "vulns": []}
    hole = {"id": "CVE-1", "fix_versions": ["2"]}
    sick = {"name": "sick", "version": "1", "vulns": [hole]}
    code, [line] = report({"dependencies": [lost]})
    assert code == 2 and line.startswith("NOT AUDITED: none of 1")
    code, lines = report({"dependencies": [lost, well]})
    assert code == 2 and lines == [
        "No known vulnerability in 1 packages.",
        "NOT AUDITED: 1 packages: lost",
    ]
    assert report({"dependencies": [well]})[0] == 0
    code, lines = report({"dependencies": [well, sick]})
    assert code == 1 and lines[0] == "sick 1: CVE-1, fixed in 2"
