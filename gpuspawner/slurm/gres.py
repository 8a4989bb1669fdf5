"""What Slurm calls the models of GPUs. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

GRES_TYPE = re.compile(r"[a-z0-9](?:[a-z0-9_-]{0,62})")
"""What Slurm takes as the type of a device."""

_MAKERS_WORDS = frozenset(
    ("nvidia", "tesla", "geforce", "quadro", "graphics", "device", "generation")
)


def gres_type(model: str) -> str:
    """Slurm's word for a model: ``a100`` for ``NVIDIA A100-SXM4-80GB``, ``rtx-4090``."""
    kept: list[str] = []
    for word in _words(model):
        kept.append(word)
        if any(character.isdigit() for character in word):
            break
    return "-".join(kept)[:63] or "gpu"


def gres_types(models: Iterable[str]) -> dict[str, str]:
    """Slurm's word for each model, no two the same. Models that would share one get their whole
    names."""
    short = {model: gres_type(model) for model in sorted(set(models))}
    often = Counter(short.values())
    found: dict[str, str] = {}
    for model, word in short.items():
        wanted = word if often[word] == 1 else "-".join(_words(model))[:58] or word
        number = 1
        while (name := wanted if number == 1 else f"{wanted[:58]}-{number}") in found.values():
            number += 1
        found[model] = name
    return found


def _words(model: str) -> list[str]:
    words = re.findall(r"[a-z0-9]+", model.lower())
    return [word for word in words if word not in _MAKERS_WORDS] or words
