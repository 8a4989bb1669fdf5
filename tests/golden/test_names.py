"""Names that others rely on: settings, entry points, names for configuration files, metrics."""

from __future__ import annotations

import configparser
import inspect
import re
from collections import defaultdict
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from traitlets import DefaultHandler, TraitType
from traitlets.config import Configurable

import gpuspawner
from tests.golden.conftest import Golden, configurables
from tests.golden.site import ADMIN, Site
from tests.support import doc_blocks
from tests.support.processes import REPO

MODULES = "gpuspawner."


# Settings.


def test_settings_match_the_recording(golden: Golden) -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for cls in configurables():
        for name, trait in cls.class_traits(config=True).items():
            if trait.this_class.__module__.startswith(MODULES):
                found[described(cls, name, trait)].append(cls.__name__)
            elif default := default_of_ours(cls, name):
                found[f"{name} (not ours)\n  default: {default}"].append(cls.__name__)
    golden(
        "settings.txt",
        "\n\n".join(sorted(f"{key}\n  of: {', '.join(found[key])}" for key in found)),
    )


def described(cls: type[Configurable], name: str, trait: TraitType[Any, Any]) -> str:
    """A setting with its type, default and help."""
    default = default_of_ours(cls, name) or repr(plain(trait.default()))
    text = inspect.cleandoc(trait.help).replace("\n", "\n    ")
    return f"{name}\n  type: {type_of(trait)}\n  default: {default}\n  help:\n    {text}"


def type_of(trait: Any) -> str:
    """The type of a trait, with the types of what is in it and its limits."""
    inner = [*getattr(trait, "trait_types", ())]
    inner += [x for n in ("_trait", "_key_trait", "_value_trait") if (x := getattr(trait, n, None))]
    limits = [f"{n}={x}" for n in ("min", "max") if (x := getattr(trait, n, None)) is not None]
    words = [*map(type_of, inner), *map(repr, getattr(trait, "values", None) or ()), *limits]
    name = type(trait).__name__
    return f"{name}[{', '.join(words)}]" if words else name


def plain(value: Any) -> Any:
    """The value with sets in order."""
    return sorted(value) if isinstance(value, (set, frozenset)) else value


def default_of_ours(cls: type[Configurable], name: str) -> str:
    """Say that a class of ours makes the default of a setting when it starts."""
    for each in cls.__mro__:
        if each.__module__.startswith(MODULES) and any(
            isinstance(made, DefaultHandler) and made.trait_name == name
            for made in vars(each).values()
        ):
            return "made at the start"
    return ""


# Entry points and names for configuration files.


def test_entry_points_match_the_recording(golden: Golden) -> None:
    parser = configparser.ConfigParser()
    parser.read(REPO / "setup.cfg", encoding="utf-8")
    lines = []
    for group, text in parser["options.entry_points"].items():
        for line in filter(None, text.splitlines()):
            name, _, target = line.partition("=")
            lines.append(f"{group}: {name.strip()} = {target.rpartition(':')[2].strip()}")
    golden("entry-points.txt", "\n".join(sorted(lines)))


def test_public_names_match_the_recording(golden: Golden) -> None:
    hub_config = (REPO / "hub_config").rglob("*.py")
    documents = [REPO / "README.md", *hub_config, *doc_blocks.pages()]
    texts = [path.read_text(encoding="utf-8") for path in documents]
    dotted = {name for text in texts for name in re.findall(r"\bgpuspawner(?:\.\w+)+", text)}
    imported = {
        f"{module}.{name}"
        for text in texts
        for module, names in re.findall(r"from (gpuspawner[\w.]*) import ([\w, ]+)", text)
        for name in re.split(r", *", names)
    }
    public = [f"gpuspawner.__all__: {name}" for name in sorted(gpuspawner.__all__)]
    assert all(hasattr(gpuspawner, name) for name in gpuspawner.__all__)
    golden("public-names.txt", "\n".join([*public, *sorted(dotted | imported)]))


# Metrics.


def test_metrics_match_the_recording(golden: Golden, site: Site) -> None:
    _, _, text = site.service(ADMIN, "metrics").partition("\n")
    lines = []
    for family in text_string_to_metric_families(text):
        labels = sorted({label for sample in family.samples for label in sample.labels})
        names = sorted({sample.name for sample in family.samples})
        lines.append(f"{family.name} ({family.type}): {family.documentation}")
        lines += [f"  labels: {', '.join(labels)}"] if labels else []
        lines += [f"  samples: {', '.join(names)}"] if names != [family.name] else []
    golden("metrics.txt", "\n".join(lines))
