"""What the images have in the place of `jupyterhub-singleuser`, with versions of what it imports
that are not ours. Real: Python's imports. Stand-ins: the packages, of a few lines each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import REPO

pytestmark = pytest.mark.usefixtures("processes")

PROGRAM = REPO / "images" / "common" / "singleuser.py"

PACKAGES = {
    "sqlalchemy/__init__.py": "from sqlalchemy import engine\nfunc = inspect = 'theirs'",
    "sqlalchemy/engine.py": "from sqlalchemy import exc\nkept = exc.SQLAlchemyError",
    "sqlalchemy/exc.py": "class SQLAlchemyError(Exception): pass\nclass Other(Exception): pass",
    "jupyterhub/__init__.py": "",
    "jupyterhub/orm.py": "import sqlalchemy",
    "jupyterhub/utils.py": "from sqlalchemy.exc import SQLAlchemyError",
    "jupyterhub/scopes.py": "import sqlalchemy as sa\nfrom jupyterhub import orm",
    "jupyterhub/handlers/__init__.py": "import sqlalchemy",
    "jupyterhub/handlers/pages.py": "class HealthCheckHandler: pass",
    "jupyterhub/log.py": "from jupyterhub.handlers.pages import HealthCheckHandler",
    "jupyterlab_server/__init__.py": "",
    "jupyterlab_server/listings_handler.py": "import requests",
    "requests/__init__.py": "Session = 'theirs'",
}

BEGIN = f"""
import runpy, sys
program = runpy.run_path({str(PROGRAM)!r})
program["without_hub"](); program["without_listings"]()
early = sorted({{"sqlalchemy", "requests"}} & set(sys.modules))
import jupyterhub.utils, jupyterhub.scopes, jupyterhub.log, jupyterlab_server.listings_handler
"""
LATER = """
import sqlalchemy, sqlalchemy.exc, requests
assert sqlalchemy.engine.kept is sqlalchemy.exc.SQLAlchemyError and sqlalchemy.func == "theirs"
assert jupyterlab_server.listings_handler.requests.Session == requests.Session == "theirs"
assert jupyterhub.scopes.sa.inspect == jupyterhub.scopes.orm.sqlalchemy.inspect == "theirs"
from jupyterhub.handlers import pages
assert pages.HealthCheckHandler and jupyterhub.handlers.sqlalchemy is sqlalchemy
print(*early)
"""


def early(folder: Path, changed: dict[str, str]) -> list[str]:
    """Of the packages left out, those that were imported all the same; later all is theirs."""
    for name, text in {**PACKAGES, **changed}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n")
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder)!r})"]
    command[-1] += BEGIN + LATER
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_unneeded_packages_are_imported_only_when_used(tmp_path: Path) -> None:
    assert early(tmp_path, {}) == []


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("jupyterhub/utils.py", "from sqlalchemy.exc import Other"),
        ("jupyterhub/utils.py", "from sqlalchemy.engine import kept"),
        ("jupyterhub/scopes.py", "import sqlalchemy as sa; from jupyterhub import orm; sa.inspect"),
    ],
)
def test_other_package_versions_import_what_they_need(tmp_path: Path, file: str, text: str) -> None:
    assert set(early(tmp_path, {file: text})) <= {"sqlalchemy"}
