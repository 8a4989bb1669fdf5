"""The admin's rules on which groups may use which images of their own. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.errors import ConfigError, InvalidRequest, NotAllowed

LONGEST = 255

_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_HOST = r"[A-Za-z0-9][A-Za-z0-9.-]*(?::[0-9]{1,5})?"
_REFERENCE = re.compile(
    rf"(?:{_HOST}/)?{_PART}(?:/{_PART})*(?::[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}})?"
    r"(?:@sha256:[0-9a-f]{64})?"
)
_SIZE = re.compile(r"([1-9][0-9]{0,5})([MGT])", re.IGNORECASE)
_UNITS = {"M": 2**20, "G": 2**30, "T": 2**40}
_KEYS = ("images", "most", "labels")


@dataclass(frozen=True, slots=True)
class OwnImages:
    """The rule on the images that members of one group may use."""

    images: tuple[str, ...]
    """Patterns of references: ``*`` matches anything but a slash, ``**`` also slashes."""
    most: int | None = None
    """Maximum size in bytes on the engine's disk; None for any."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that an image must have, such as those of a scanner."""

    def allows(self, reference: str) -> bool:
        """Return True if a pattern matches; a reference without a tag means ``latest``."""
        name, at, _ = reference.partition("@")
        tagged = name if ":" in name.rpartition("/")[2] or at else f"{name}:latest"
        return any(_pattern(some).fullmatch(tagged) for some in self.images)


def own_images(settings: Mapping[str, Any], groups: Collection[str]) -> list[OwnImages]:
    """Return the rules for a member of these groups or of ``*`` (all). Raises ConfigError."""
    rules = {group: _rule(str(group), rule) for group, rule in settings.items()}
    return [rule for group, rule in rules.items() if group == "*" or group in groups]


def check_own_image(reference: str, rules: Sequence[OwnImages]) -> list[OwnImages]:
    """Return the rules that allow a reference. Raises InvalidRequest, or NotAllowed."""
    if len(reference) > LONGEST or not _REFERENCE.fullmatch(reference):
        raise InvalidRequest(
            f"The field 'own_image' is {reference[:60]!r}: write an image as for docker pull, "
            "such as lab/tools:1.2.",
            field="own_image",
        )
    if not rules:
        raise NotAllowed(
            "You may not bring an image of your own: choose an environment, or ask your admin.",
            field="own_image",
        )
    allowing = [rule for rule in rules if rule.allows(reference)]
    if not allowing:
        patterns = ", ".join(sorted({some for rule in rules for some in rule.images}))
        raise NotAllowed(
            f"You may not use the image {reference}. Yours may be: {patterns}.", field="own_image"
        )
    return allowing


def check_contents(
    reference: str, size: int, labels: Mapping[str, str], rules: Sequence[OwnImages]
) -> None:
    """Raise NotAllowed unless a pulled image meets one of the rules on size and labels."""
    wrong = [_wrong(size, labels, rule) for rule in rules]
    if all(wrong):
        raise NotAllowed(f"You may not use the image {reference}: {wrong[0]}.", field="own_image")


def _wrong(size: int, labels: Mapping[str, str], rule: OwnImages) -> str:
    if rule.most is not None and size > rule.most:
        return f"it takes {size / 2**30:.1f} GB, and {rule.most / 2**30:.1f} GB is the most"
    for name, value in rule.labels.items():
        if name not in labels:
            return f"it does not carry the label {name}"
        if labels[name] != value:
            return f"its label {name} is {labels[name][:60]!r}, and has to be {value!r}"
    return ""


def _pattern(text: str) -> re.Pattern[str]:
    """Convert an admin's pattern to a regular expression. Without a tag it matches any tag."""
    parts = re.split(r"(\*\*|\*)", text)
    expression = "".join({"**": ".*", "*": "[^/]*"}.get(part, re.escape(part)) for part in parts)
    if ":" not in text.rpartition("/")[2] and not text.endswith("*"):
        expression += "(?::[^/]*)?"
    return re.compile(expression)


def _rule(group: str, rule: Any) -> OwnImages:
    where = f"c.GPUDockerSpawner.own_images[{group!r}]"
    if not isinstance(rule, Mapping) or not set(rule) <= set(_KEYS):
        raise ConfigError(what=f"{where} holds {', '.join(_KEYS)}, and nothing else")
    images, labels = rule.get("images"), rule.get("labels", {})
    if not _texts(images) or not images:
        raise ConfigError(what=f"{where}['images'] is a list of patterns, such as ['lab/**']")
    if not isinstance(labels, Mapping) or not _texts([*labels, *labels.values()]):
        raise ConfigError(what=f"{where}['labels'] is a dictionary of texts")
    most, size = rule.get("most"), None
    if most is not None:
        found = _SIZE.fullmatch(str(most))
        if not found:
            raise ConfigError(what=f"{where}['most'] is a size, such as '20G'")
        size = int(found[1]) * _UNITS[found[2].upper()]
    return OwnImages(tuple(images), size, dict(labels))


def _texts(values: Any) -> bool:
    return isinstance(values, (list, tuple)) and all(isinstance(x, str) and x for x in values)
