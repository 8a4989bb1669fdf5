"""A real wheel in a real environment outside the checkout, with the oldest versions we allow."""

from __future__ import annotations

import configparser
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.processes import BIN, REPO, kept_dir, one_at_a_time

TOOLS = (
    *("aiosmtpd", "hypothesis", "jupyterhub-ldapauthenticator", "psutil", "pytest"),
    *("jupyterhub-ltiauthenticator", "pytest-asyncio", "pytest-timeout", "requests"),
)
"""What these tests need beside gpuspawner, in whatever version there is."""

SENT = tuple(
    f"tests/integration/notifications/test_channels.py::test_{name}"
    for name in (
        "notice_is_mailed_exactly_once",
        "line_breaks_cannot_inject_mail_headers",
        "mail_is_retried_until_the_server_returns",
        "mail_requires_a_verified_tls_certificate",
        "channel_secret_file_requires_mode_600",
    )
)
"""What an older Apprise could do in another way."""

STORED = tuple(
    f"tests/integration/{name}.py"
    for name in ("leases/test_grants", "db/test_constraints", "db/test_migrations")
)
"""What older ways to a database could do in another way. The rules are pure, and tested once."""

RACES = "concurrent_processes"
"""Tests of what processes do to one another: the same with any version, and long."""

PURE = (
    "catalog/test_hostile_text",
    "catalog/test_watched_catalog",
    "core/test_aio",
    "core/test_weeks",
    "deployment/test_dockerfiles",
    "devices",
    "docs",
    "engines/test_process_owners",
    "leases",
    "ledger/test_credit_policy",
    "ledger/test_grant_files",
    "ledger/test_lots",
    "ledger/test_pricing",
    "ledger/test_rules",
    "members",
    "monitoring/test_charts",
    "monitoring/test_health",
    "monitoring/test_idle",
    "monitoring/test_rollups",
    "queue",
    "scripts",
    "storage",
)
"""Unit tests of what imports little but Python itself, of what reads files in our own way, and of
the documentation, which is built with the newest versions."""

OWN = ("support",)
"""Unit tests of the tests' own support, which needs more than is installed here."""

UNUSED = 7 * 86_400
"""Seconds after which an environment of older bounds is removed."""

PROBE = """
    import json, pathlib, sys
    import gpuspawner
    from importlib.metadata import entry_points
    from gpuspawner.services import Services
    from gpuspawner.leases.models import Request, ServerRef
    from gpuspawner.spawners import form
    from gpuspawner.web import pages
    from traitlets.config import Config

    services = Services(Config({"GPUDevices": {"source": "simulated:2xT4"}}))
    lease = services.leases.grant(ServerRef("alice"), Request(devices=1), engine="local")
    names = [
        point.name
        for group in ("jupyterhub.spawners", "jupyterhub.authenticators")
        for point in sorted(entry_points(group=group))
        if point.value.startswith("gpuspawner") and point.load()
    ]
    print(json.dumps({
        "at": gpuspawner.__file__,
        "devices": len(lease.devices),
        "form": bool(form.templates.get_template("form.html")),
        "gpu": names,
        "files": sorted(
            path.suffix for path in pathlib.Path(gpuspawner.__file__).parent.rglob("*")
            if path.suffix in (".html", ".css", ".js", ".mako", ".txt")
        ),
    }))
"""


def lower_bounds() -> dict[str, str]:
    """Each requirement of setup.cfg, and PostgreSQL's driver, with the oldest version allowed."""
    config = configparser.ConfigParser()
    config.read(REPO / "setup.cfg")
    lines = config["options"]["install_requires"].split()
    lines += config["options.extras_require"]["postgres"].split()
    return dict(line.split(">=") for line in lines)


def test_every_requirement_has_a_lower_bound() -> None:
    ours = {"jupyterhub", "dockerspawner", "oauthenticator", "nvidia-ml-py", "apprise"}
    assert ours <= set(lower_bounds())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy, so that nothing of a build stays in the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(REPO / "gpuspawner", source / "gpuspawner", ignore=ignored)
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPO / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, source]
    subprocess.run(command, check=True)
    return next(folder.glob("*.whl"))


@dataclass(frozen=True, slots=True)
class Installed:
    """A Python environment, and the wheel installed beside it."""

    python: Path
    wheel: Path
    """The folder that the wheel is installed into."""

    def run(self, *arguments: str, cwd: Path) -> str:
        """Run Python away from the checkout, without its modules."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        environment["PATH"] = os.pathsep.join(
            [str(self.python.parent), str(BIN), os.environ["PATH"]]
        )
        environment["PYTHONPATH"] = str(self.wheel)
        done = subprocess.run(
            [self.python, *arguments], cwd=cwd, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def oldest(soak: None, wheel: Path) -> Installed:
    bounds = [f"{name}=={version}" for name, version in lower_bounds().items()]
    made_of = json.dumps([sys.version, sys.base_prefix, bounds, TOOLS])
    folder = kept_dir() / f"oldest-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}"
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    with one_at_a_time("oldest"):
        if not (folder / "ready").exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
            subprocess.run([*pip, *bounds, *TOOLS], check=True)
        (folder / "ready").touch()
        for ready in kept_dir().glob("oldest-*/ready"):
            if time.time() - ready.stat().st_mtime > UNUSED:
                shutil.rmtree(ready.parent)
    subprocess.run([*pip, "--no-deps", "--target", wheel.parent / "installed", wheel], check=True)
    return Installed(python, wheel.parent / "installed")


def test_wheel_runs_outside_the_checkout(processes: None, wheel: Path, tmp_path: Path) -> None:
    """With the versions that are installed here; pages and migrations come from the wheel."""
    target = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as files:
        files.extractall(target)
    assert_runs(Installed(Path(sys.executable), target), tmp_path)


def test_wheel_runs_with_the_oldest_versions(oldest: Installed, tmp_path: Path) -> None:
    assert_runs(oldest, tmp_path)


def assert_runs(installed: Installed, folder: Path) -> None:
    found = json.loads(installed.run("-c", textwrap.dedent(PROBE), cwd=folder).splitlines()[-1])
    assert str(REPO / "gpuspawner") not in found["at"]
    assert found["devices"] == 1, "the migrations are not in the wheel"
    assert found["form"]
    assert set(found["files"]) == {".css", ".html", ".js", ".mako", ".txt"}
    members = ("cilogon", "github", "gitlab", "google", "ldap", "microsoft", "oauth")
    assert found["gpu"] == [
        *("gpu-docker", "gpu-local", "gpu-slurm"),
        *(f"gpu-members-{name}" for name in (*members, "shared-password")),
    ]
    accounts = installed.run("-m", "gpuspawner", "accounts", "--json", cwd=folder)
    assert "member:alice" in accounts


def test_unit_tests_pass_with_the_oldest_versions(oldest: Installed) -> None:
    installed = oldest.run("-m", "pip", "list", "--format=json", cwd=REPO)
    versions = {
        entry["name"].lower().replace("_", "-"): entry["version"] for entry in json.loads(installed)
    }
    for name, bound in lower_bounds().items():
        version = versions[name.partition("[")[0].replace("_", "-")]
        assert re.match(rf"{re.escape(bound)}(\.0)*$", version), (name, version)
    chosen = ("tests/unit", *STORED, *SENT)
    there = [path for path in chosen if (REPO / path.partition("::")[0]).exists()]
    output = oldest.run(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header"),
        *("-k", f"not {RACES}"),
        *(f"--ignore-glob=tests/unit/{name}*" for name in (*PURE, *OWN)),
        *there,
        cwd=REPO,
    )
    assert " passed" in output
