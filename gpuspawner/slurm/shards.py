"""Which devices of a cluster are shared, from the command line. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..core.errors import ConfigError
from ..devices.models import model_matches, model_words
from .cluster import MOST_SHARDS, Node

_WORD = re.compile(r"(?:(?:(?P<node>[^/=]+)/)?(?P<model>[^/=]+)=)?(?P<count>[0-9]{1,4})")


@dataclass(frozen=True, slots=True)
class ShardRule:
    """How many shards each device of some models has."""

    word: str
    """As it was written."""
    count: int
    model: str = ""
    """Part of the model's name; empty means any."""
    node: str = ""
    """The only node that it holds for; empty means all."""

    def fits(self, node: Node, model: str) -> bool:
        """Return True if the rule holds for a model of a node."""
        return self.node in ("", node.name) and model_matches(self.model, model)

    @property
    def rank(self) -> tuple[bool, int, str]:
        """A key that sorts rules: a node's own come last, then those with more words."""
        return self.node != "", len(model_words(self.model)), self.word


def parse_shards(words: Iterable[str]) -> list[ShardRule]:
    """Parse ``4``, ``A100=4`` and ``gpu1/A100=4``. Raises ConfigError."""
    rules = []
    for word in words:
        found = _WORD.fullmatch(word)
        if found is None or (found["model"] and not model_words(found["model"])):
            raise ConfigError(
                f"--shards {word!r}: write a number for all GPUs such as 4, for a model such as "
                "A100=4, or for a model of one node such as gpu1/A100=4."
            )
        if int(found["count"]) > MOST_SHARDS:
            raise ConfigError(f"--shards {word!r}: {MOST_SHARDS} is the most for one GPU.")
        rules.append(
            ShardRule(word, int(found["count"]), found["model"] or "", found["node"] or "")
        )
    return rules


def with_shards(nodes: Sequence[Node], rules: Sequence[ShardRule]) -> tuple[Node, ...]:
    """Return the nodes with the shards of their types. Raises ConfigError for an unknown model."""
    for rule in rules:
        if not any(rule.fits(node, d.model) for node in nodes for d in node.devices):
            names = sorted({device.model for node in nodes for device in node.devices})
            raise ConfigError(
                f"--shards {rule.word!r} fits no GPU of these hosts. Their models are: "
                f"{', '.join(names) or 'none'}."
            )
    found = []
    for node in nodes:
        shards = {}
        for device in node.devices:
            fitting = [rule for rule in rules if rule.fits(node, device.model)]
            best = max(fitting, key=lambda rule: rule.rank, default=None)
            if best is not None and best.count > 1:
                shards[device.gres] = best.count
        found.append(replace(node, shards=shards))
    return tuple(found)
