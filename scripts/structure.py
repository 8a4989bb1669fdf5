"""Prints the size and shape of the code, beside the targets of issue 20.

It reads the source text and imports nothing, so it measures any checkout:
``scripts/structure.py [FOLDER]``. It reports only, and its exit status is always 0.
"""

from __future__ import annotations

import ast
import configparser
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

PACKAGE = "gpuspawner"
SERVICES = "Services"
"""The class that holds the services."""
ROUTE = ("jupyterhub.spawners", "gpu-docker")
"""The entry point at which the walk of a lease begins."""
LEASE_NAME = re.compile(r"(^|_)leases?(_|$)|Lease")
"""An identifier with the word lease in it, and not release."""


@dataclass(frozen=True)
class Module:
    """One module: its name in the package, and its syntax tree."""

    name: str
    is_package: bool
    lines: int
    tree: ast.Module

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        """The classes at the top level, by name."""
        return {node.name: node for node in self.tree.body if isinstance(node, ast.ClassDef)}

    @cached_property
    def names(self) -> set[str]:
        """The identifiers in the code, and not the words in texts and comments."""
        found = set()
        for node in ast.walk(self.tree):
            match node:
                case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                    found.add(name)
                case ast.alias(name=name):
                    found.add(name.rpartition(".")[2])
                case ast.keyword(arg=str(name)) | ast.ClassDef(name=name):
                    found.add(name)
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    found.add(name)
        return found


@dataclass
class Code:
    """All modules of a package, by name."""

    modules: Mapping[str, Module]
    _ancestry: dict[tuple[str, str], list[tuple[str, str]]] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Code:
        """Read every module of the package in this folder."""
        found = {}
        for path in sorted(folder.rglob("*.py")):
            parts = [folder.name, *path.relative_to(folder).with_suffix("").parts]
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            text = path.read_text(encoding="utf-8")
            found[name] = Module(name, is_package, count_lines(text), ast.parse(text))
        return cls(found)

    # Imports.

    def imports(self, *, everywhere: bool) -> dict[str, set[str]]:
        """Return the modules that each module imports.

        ``everywhere``: also in functions and for the type checker; else only what runs when the
        module is imported.
        """
        return {
            name: {target for target, _, _ in self._imported(module, everywhere)} - {name}
            for name, module in self.modules.items()
        }

    def _imported(self, module: Module, everywhere: bool) -> Iterator[tuple[str, str, str]]:
        """Yield a module of ours, what is taken of it (empty: itself), and its name here."""
        walked = ast.walk(module.tree) if everywhere else _at_import(module.tree.body)
        for node in walked:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name in self.modules:
                        yield alias.name, "", alias.asname or alias.name
            elif isinstance(node, ast.ImportFrom):
                base = _base_of(node, module)
                for alias in node.names:
                    here = alias.asname or alias.name
                    if f"{base}.{alias.name}" in self.modules:
                        yield f"{base}.{alias.name}", "", here
                    elif base in self.modules:
                        yield base, alias.name, here

    def cycles(self, *, everywhere: bool) -> list[list[str]]:
        """Return the groups of modules that import one another."""
        graph = self.imports(everywhere=everywhere)
        reached = {name: _reachable(graph, name) for name in graph}
        groups = {
            frozenset(other for other in reached[name] if name in reached[other]) | {name}
            for name in graph
        }
        return sorted(sorted(group) for group in groups if len(group) > 1)

    # Classes.

    def class_names_used_twice(self) -> list[str]:
        """Return the names that classes of more than one module have."""
        count = Counter(name for module in self.modules.values() for name in module.classes)
        return sorted(name for name, times in count.items() if times > 1)

    def find_class(self, module: str, name: str) -> tuple[str, str] | None:
        """Return the module and the name of the class that a name means in a module."""
        seen = set()
        while module in self.modules and (module, name) not in seen:
            seen.add((module, name))
            if name in self.modules[module].classes:
                return module, name
            for target, taken, here in self._imported(self.modules[module], True):
                if here == name and taken:
                    module, name = target, taken
                    break
        return None

    def ancestry(self, cls: tuple[str, str]) -> list[tuple[str, str]]:
        """Return a class and all classes of ours that it inherits from."""
        if cls not in self._ancestry:
            module, name = cls
            found = [cls]
            for base in self.modules[module].classes[name].bases:
                parent = self._class_of(module, base)
                for each in self.ancestry(parent) if parent else []:
                    if each not in found:
                        found.append(each)
            self._ancestry[cls] = found
        return self._ancestry[cls]

    def _class_of(self, module: str, node: ast.expr) -> tuple[str, str] | None:
        """Return the class of ours that an expression names: ``Name`` or ``module.Name``."""
        if isinstance(node, ast.Name):
            return self.find_class(module, node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            for target, taken, here in self._imported(self.modules[module], True):
                if here == node.value.id and not taken:
                    return self.find_class(target, node.attr)
        return None

    def public_methods(self, cls: tuple[str, str]) -> set[str]:
        """Return the names of a class's public methods, of those too that it inherits from us."""
        return {
            node.name
            for module, name in self.ancestry(cls)
            for node in self.modules[module].classes[name].body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and not node.name.startswith("_")
            and not any(ast.unparse(each).startswith("default(") for each in node.decorator_list)
        }

    def services(self) -> list[tuple[str, str]]:
        """Return the service classes: those that :data:`SERVICES` makes its attributes of."""
        for module in self.modules.values():
            if held := module.classes.get(SERVICES):
                found = [
                    self._class_of(module.name, node.value.func)
                    for node in ast.walk(held)
                    if isinstance(node, ast.Assign)
                    and isinstance(node.value, ast.Call)
                    and ast.unparse(node.targets[0]).startswith("self.")
                ]
                return [cls for cls in found if cls]
        return []

    def traits(self) -> list[str]:
        """Return every setting that our classes declare: an attribute with ``config=True``."""
        return [
            ast.unparse(node.targets[0])
            for module in self.modules.values()
            for cls in module.classes.values()
            for node in cls.body
            if isinstance(node, ast.Assign)
            and any(
                isinstance(part, ast.keyword)
                and part.arg == "config"
                and isinstance(part.value, ast.Constant)
                and part.value.value is True
                for part in ast.walk(node.value)
            )
        ]

    # A lease.

    def lease_modules(self, start: str) -> list[str]:
        """Return the modules that handle a lease from the form to its settlement, approximately.

        These are the modules that the Docker spawner reaches by imports, directly or through
        others and wherever the import is written, and whose code has an identifier with the word
        lease in it. The spawner has the form, starts, stops and releases, so settlement is among
        them. Too many are counted where a module names a lease and plays no part here, and too
        few where the accounting service does a step that the spawner never does.
        """
        graph = self.imports(everywhere=True)
        walked = _reachable(graph, start) | {start}
        return sorted(
            name for name in walked if any(map(LEASE_NAME.search, self.modules[name].names))
        )


def count_lines(text: str) -> int:
    """Return the number of lines, blank ones and comments included."""
    return len(text.splitlines())


def entry_points(setup: Path) -> dict[str, dict[str, tuple[str, str]]]:
    """Return module and class of each entry point, by group and name."""
    parser = configparser.ConfigParser()
    parser.read(setup, encoding="utf-8")
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for group, lines in parser["options.entry_points"].items():
        for line in filter(None, lines.splitlines()):
            name, _, target = line.partition("=")
            module, _, attribute = target.strip().partition(":")
            found.setdefault(group, {})[name.strip()] = module, attribute
    return found


def _at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that run when a module is imported."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _at_import(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.stmt)]
            yield from _at_import(inner)


def _base_of(node: ast.ImportFrom, module: Module) -> str:
    """Return the absolute name of the module after ``from``."""
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    up = node.level - 1 if module.is_package else node.level
    return ".".join([*parts[: len(parts) - up], *([node.module] if node.module else [])])


def _reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    """Return every node that can be reached by one step or more."""
    found: set[str] = set()
    left = [start]
    while left:
        new = graph[left.pop()] - found
        found |= new
        left.extend(new)
    return found


def measure(root: Path) -> list[tuple[str, str, str]]:
    """Return what is measured, the figure, and the target that it is to keep to."""
    code = Code.read(root / PACKAGE)
    points = entry_points(root / "setup.cfg")
    spawners = [found for cls in points[ROUTE[0]].values() if (found := code.find_class(*cls))]
    tests = [count_lines(p.read_text(encoding="utf-8")) for p in (root / "tests").rglob("*.py")]
    methods = [len(code.public_methods(cls)) for cls in code.services()]
    cycles, at_import = (len(code.cycles(everywhere=each)) for each in (True, False))
    lease = code.lease_modules(points[ROUTE[0]][ROUTE[1]][0])
    total = sum(module.lines for module in code.modules.values())
    return [
        (f"modules in {PACKAGE}/", f"{len(code.modules):,}", "190"),
        (f"lines of Python in {PACKAGE}/", f"{total:,}", "48,000"),
        ("lines of tests and their support", f"{sum(tests):,}", "45,000"),
        (
            "classes of ours in a spawner's MRO",
            f"{max((len(code.ancestry(cls)) for cls in spawners), default=0)}",
            "4",
        ),
        ("public methods of the largest service", f"{max(methods, default=0)}", "25"),
        ("import cycles between modules", f"{cycles} ({at_import} at import)", "0"),
        ("class names used twice", f"{len(code.class_names_used_twice())}", "0"),
        ("traits", f"{len(code.traits())}", "70"),
        ("modules that a lease passes (approximately)", f"{len(lease)}", "40"),
    ]


def main() -> int:
    """Print the table."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]
    rows = [("", "now", "at most"), *measure(root)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, now, most in rows:
        print(f"{name:<{widths[0]}}  {now:>{widths[1]}}  {most:>{widths[2]}}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
