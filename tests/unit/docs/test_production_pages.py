"""The tutorials and the how-to pages for clusters and production: what they have in common with the
README, the alerts and the metrics. Real: those files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.support import doc_blocks, steps
from tests.support.processes import REPO


def pages(*folders: str) -> list[Path]:
    return [
        page
        for page in doc_blocks.pages()
        if str(page.parent.relative_to(doc_blocks.DOCS)) in folders and page.stem != "index"
    ]


TUTORIALS = pages("tutorials")
HOW_TO = pages("how-to/cluster", "how-to/production")
PAGES = [*TUTORIALS, *HOW_TO]


def test_agreed_pages_exist() -> None:
    names = {str(page.relative_to(doc_blocks.DOCS)) for page in PAGES}
    assert len(TUTORIALS) == 3 and len(HOW_TO) >= 18
    assert names >= {
        "tutorials/try-it.md",
        "tutorials/your-gpu-box.md",
        "tutorials/a-second-machine.md",
        "how-to/cluster/add-a-second-machine.md",
        "how-to/production/back-up-and-restore.md",
        "how-to/production/monitor-with-prometheus.md",
        "how-to/production/put-it-behind-tls.md",
        "how-to/production/upgrade.md",
        "how-to/production/use-postgresql.md",
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_pages_say_what_to_do_when_something_goes_wrong(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.count("\n## When something goes wrong\n") == (
        page.stem not in ("troubleshoot", "security-checklist")
    )


def test_alerts_and_metrics_in_pages_are_those_of_the_code() -> None:
    page = doc_blocks.DOCS / "how-to/production/monitor-with-prometheus.md"
    text = page.read_text(encoding="utf-8")
    groups = yaml.safe_load((REPO / "hub_config/alerts.yaml").read_text())["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"]}
    rows = re.findall(r"^\| (`[A-Z].+?) \| (?:critical|warning|info) \|", text, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == alerts
    assert f"the {len(alerts)} rules" in text
    metrics = (REPO / "tests/golden/recorded/metrics.txt").read_text(encoding="utf-8")
    counters = re.findall(r"^(\w+) \(counter\)", metrics, re.MULTILINE)
    known = {*re.findall(r"\bgpuspawner_\w+", metrics), *(f"{name}_total" for name in counters)}
    assert {*re.findall(r"\bgpuspawner_[a-z_]+\b(?=[{\[ )])", text)} <= known


def test_readme_installs_as_the_tutorial_does() -> None:
    """Each step of the README is in the tutorial, whose steps tests/hub/test_box.py runs."""
    text = (REPO / "README.md").read_text(encoding="utf-8")
    box = text.partition("\n## Install it on a GPU box\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"^```sh\n(.*?)^```$", box, re.MULTILINE | re.DOTALL)
    tutorial = "".join(doc_blocks.shell_in(steps.BOX))
    at = 0
    for step in block.splitlines():
        assert step in tutorial[at:], f"the tutorial lacks, or has in another place: {step}"
        at = tutorial.index(step, at)
