"""Scripts of ours find what they look for. Real: detect-secrets and files; no network."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from scripts.audit_dependencies import report
from scripts.scan_secrets import GUESSES, scan
from scripts.structure import Code, entry_points, measure

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


# What scripts/structure.py counts, on a small package


FILES = {
    "__init__.py": "",
    "spawner.py": """
        from typing import TYPE_CHECKING
        from traitlets import Unicode
        from .form import Form
        from . import leases
        if TYPE_CHECKING:
            from .page import Page
        class Spawner(Form):
            image = Unicode("x", config=True)
            place = Unicode("x").tag(config=True)
            quiet = Unicode("x")
            def stop(self): leases.release(self.lease_id)
        """,
    "form.py": """
        from elsewhere import Base
        class Field: ...
        class Form(Base):
            def show(self): ...
            def _draw(self): ...
        """,
    "page.py": """
        from gpuspawner.spawner import Spawner
        class Field: ...
        class Page:
            class Field: ...
        """,
    "leases/__init__.py": "from .service import LeaseService, release",
    "leases/service.py": """
        class Reads:
            def find(self): ...
            def _row(self): ...
        class LeaseService(Reads):
            def grant(self):
                from .. import books
                books.settle()
            async def extend(self): ...
            @property
            def count(self): ...
            @default("limit")
            def usual_limit(self): ...
            def find(self): ...
        def release(lease_id): ...
        """,
    "books.py": """
        import gpuspawner.leases.service
        # a lease in a comment
        def settle(): "a lease in a text"
        """,
    "wiring.py": """
        from . import leases
        from .page import Page
        class Services:
            def __init__(self):
                self.leases = leases.LeaseService()
                self.page = Page()
                self.name = str()
        """,
}
SETUP = """
[options.entry_points]
jupyterhub.spawners =
    gpu-docker = gpuspawner.spawner:Spawner
console_scripts =
    gpuspawner = gpuspawner.page:main
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "gpuspawner" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text).strip(), encoding="utf-8")
    (tmp_path / "setup.cfg").write_text(SETUP, encoding="utf-8")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_one.py").write_text("1\n\n2\n", encoding="utf-8")
    return tmp_path


@pytest.fixture
def code(root: Path) -> Code:
    return Code.read(root / "gpuspawner")


def test_structure_script_finds_classes_methods_and_services(code: Code, root: Path) -> None:
    spawner = ("gpuspawner.spawner", "Spawner")
    assert code.ancestry(spawner) == [spawner, ("gpuspawner.form", "Form")]
    service = ("gpuspawner.leases.service", "LeaseService")
    assert code.find_class("gpuspawner.leases", "LeaseService") == service
    assert code.public_methods(service) == {"count", "extend", "find", "grant"}
    assert code.services() == [service, ("gpuspawner.page", "Page")]
    assert entry_points(root / "setup.cfg")["jupyterhub.spawners"] == {"gpu-docker": spawner}


def test_structure_script_separates_imports_and_finds_cycles(code: Code) -> None:
    at_import = code.imports(everywhere=False)
    assert at_import["gpuspawner.spawner"] == {"gpuspawner.form", "gpuspawner.leases"}
    assert at_import["gpuspawner.leases.service"] == set()
    everywhere = code.imports(everywhere=True)
    assert everywhere["gpuspawner.spawner"] - at_import["gpuspawner.spawner"] == {"gpuspawner.page"}
    assert everywhere["gpuspawner.leases.service"] == {"gpuspawner.books"}
    assert everywhere["gpuspawner.books"] == {"gpuspawner.leases.service"}
    assert code.cycles(everywhere=False) == []
    assert code.cycles(everywhere=True) == [
        ["gpuspawner.books", "gpuspawner.leases.service"],
        ["gpuspawner.page", "gpuspawner.spawner"],
    ]
    passed = code.lease_modules("gpuspawner.spawner")
    assert passed == ["gpuspawner.leases", "gpuspawner.leases.service", "gpuspawner.spawner"]


def test_structure_script_measures_the_expected_figures(root: Path) -> None:
    figures = {name: figure for name, figure, _ in measure(root)}
    assert figures == {
        "modules in gpuspawner/": "8",
        "lines of Python in gpuspawner/": "45",
        "lines of tests and their support": "3",
        "classes of ours in a spawner's MRO": "2",
        "public methods of the largest service": "4",
        "import cycles between modules": "2 (0 at import)",
        "class names used twice": "1",
        "traits": "2",
        "modules that a lease passes (approximately)": "3",
    }
