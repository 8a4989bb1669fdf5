"""What scripts/structure.py counts, on a small package of the test's own. Real: the files."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from scripts.structure import Code, count_lines, entry_points, measure

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
            leases: leases.LeaseService
            page: Page
            name: str
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


def test_modules_and_lines(code: Code) -> None:
    assert sorted(code.modules) == [
        "gpuspawner",
        *(f"gpuspawner.{name}" for name in ("books", "form", "leases", "leases.service")),
        *(f"gpuspawner.{name}" for name in ("page", "spawner", "wiring")),
    ]
    assert count_lines("a\n\n# b\n") == 3


def test_imports_with_and_without_those_for_functions_and_the_type_checker(code: Code) -> None:
    at_import = code.imports(everywhere=False)
    assert at_import["gpuspawner.spawner"] == {"gpuspawner.form", "gpuspawner.leases"}
    assert at_import["gpuspawner.leases.service"] == set()
    everywhere = code.imports(everywhere=True)
    assert everywhere["gpuspawner.spawner"] - at_import["gpuspawner.spawner"] == {"gpuspawner.page"}
    assert everywhere["gpuspawner.leases.service"] == {"gpuspawner.books"}
    assert everywhere["gpuspawner.books"] == {"gpuspawner.leases.service"}


def test_cycles(code: Code) -> None:
    assert code.cycles(everywhere=False) == []
    assert code.cycles(everywhere=True) == [
        ["gpuspawner.books", "gpuspawner.leases.service"],
        ["gpuspawner.page", "gpuspawner.spawner"],
    ]


def test_class_names_of_several_modules(code: Code) -> None:
    assert code.class_names_used_twice() == ["Field"]


def test_ancestors_and_public_methods(code: Code) -> None:
    assert code.ancestry(("gpuspawner.spawner", "Spawner")) == [
        ("gpuspawner.spawner", "Spawner"),
        ("gpuspawner.form", "Form"),
    ]
    service = ("gpuspawner.leases.service", "LeaseService")
    assert code.find_class("gpuspawner.leases", "LeaseService") == service
    assert code.public_methods(service) == {"count", "extend", "find", "grant"}


def test_services_are_the_fields_of_the_dataclass(code: Code) -> None:
    assert code.services() == [
        ("gpuspawner.leases.service", "LeaseService"),
        ("gpuspawner.page", "Page"),
    ]


def test_traits(code: Code) -> None:
    assert code.traits() == ["image", "place"]


def test_modules_of_a_lease(code: Code) -> None:
    assert code.lease_modules("gpuspawner.spawner") == [
        "gpuspawner.leases",
        "gpuspawner.leases.service",
        "gpuspawner.spawner",
    ]


def test_entry_points(root: Path) -> None:
    assert entry_points(root / "setup.cfg")["jupyterhub.spawners"] == {
        "gpu-docker": ("gpuspawner.spawner", "Spawner")
    }


def test_the_table(root: Path) -> None:
    figures = {name: figure for name, figure, _ in measure(root)}
    assert figures == {
        "modules in gpuspawner/": "8",
        "lines of Python in gpuspawner/": "44",
        "lines of tests and their support": "3",
        "classes of ours in a spawner's MRO": "2",
        "public methods of the largest service": "4",
        "import cycles between modules": "2 (0 at import)",
        "class names used twice": "1",
        "traits": "2",
        "modules that a lease passes (approximately)": "3",
    }
