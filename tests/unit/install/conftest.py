"""A machine's folder and its stand-in. Real: files, templates. Nothing is started."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from gpuspawner.install import commands
from tests.unit.install.machine import FakeHost

OURS = re.compile(r"OAUTH|GITHUB_|GITLAB_|CILOGON_|AAD_|LDAP_|GPUSPAWNER_|CONFIGPROXY|JUPYTERHUB_")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty machine; no variable of this process answers a question."""
    for name in list(os.environ):
        if OURS.match(name):
            monkeypatch.delenv(name)
    folder = tmp_path / "machine"
    folder.mkdir()
    return folder


@pytest.fixture
def host(root: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHost:
    """The stand-in, which every command gets."""
    found = FakeHost(root)
    monkeypatch.setattr(commands, "open_host", lambda prefix: found)
    return found
