"""The rate card: credits per GPU-hour by device model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal

from ..errors import ConfigError
from ..model import MICRO, model_matches, model_words, parse_credits

DEFAULT_PATTERN = "*"
"""The key of the rate for every model that no other pattern names."""

MAX_RATE = 1_000_000 * MICRO
"""Greatest rate in microcredits per GPU-hour; anything above is a slip of the pen."""

_DECIMAL = re.compile(r"\d+(\.\d+)?")


@dataclass(frozen=True, slots=True)
class RateCard:
    """Rates in microcredits per GPU-hour; the most specific pattern that matches wins."""

    default: int = MICRO
    rates: tuple[tuple[str, int], ...] = ()
    """Pattern and rate, most specific (longest) pattern first."""

    @classmethod
    def from_config(cls, config: Mapping[str, int | float | str | Decimal]) -> RateCard:
        """A card from ``{"*": 1, "A100": 4, "T4": "0.5"}``, in credits per GPU-hour.

        Without ``*``, a model that no pattern names costs 1 credit an hour. To price the
        MIG instances of a model apart, name both: ``A100 MIG 1g.5gb``. Raises ConfigError
        naming the key.
        """
        if not isinstance(config, Mapping):
            raise ConfigError(
                f"The rates are not valid: {config!r} is no mapping of model to credits per "
                'GPU-hour. Write them like {"*": 1, "A100": 4}.'
            )
        default = MICRO
        rates: dict[str, tuple[str, int]] = {}
        for key, value in config.items():
            rate = _parse_rate(key, value)
            if key == DEFAULT_PATTERN:
                default = rate
                continue
            normal = _normalised(key)
            if normal in rates:
                raise ConfigError(
                    f"The rates are not valid: {rates[normal][0]!r} and {key!r} name the same "
                    "model. Keep one of them."
                )
            rates[normal] = (key, rate)
        ordered = sorted(rates.items(), key=lambda item: (-len(item[0]), item[0]))
        return cls(default=default, rates=tuple(pair for _, pair in ordered))

    def rate_of(self, model: str) -> int:
        """Microcredits per hour for one device of this model."""
        for pattern, rate in self.rates:
            if model_matches(pattern, model):
                return rate
        return self.default

    def lease_rate(self, models: Iterable[str]) -> int:
        """Microcredits per hour for all these devices together; 0 for none."""
        return sum(self.rate_of(model) for model in models)


def _normalised(key: object) -> str:
    """The pattern's words as one text, in any order; ConfigError when it has none."""
    normal = " ".join(sorted(set(model_words(key)))) if isinstance(key, str) else ""
    if not normal:
        raise ConfigError(
            f"The rates are not valid: {key!r} names no device model. Write part of a model's "
            "name such as 'A100', or '*' for every other model."
        )
    return normal


def _parse_rate(key: object, value: object) -> int:
    """``value`` credits as microcredits; ConfigError naming ``key`` otherwise."""
    remedy = "Write credits per GPU-hour as a decimal number of at least 0, such as 4 or '0.5'."
    fits = isinstance(value, (int, float, str, Decimal)) and not isinstance(value, bool)
    text = str(value).strip()
    if not fits or not _DECIMAL.fullmatch(text):
        raise ConfigError(f"The rate of {key!r} is not valid: {value!r}. {remedy}")
    try:
        rate = parse_credits(text)
    except ValueError as error:
        raise ConfigError(f"The rate of {key!r} is not valid: {error}. {remedy}") from None
    if rate > MAX_RATE:
        raise ConfigError(
            f"The rate of {key!r} is not valid: {value} credits an hour is more than 1000000. "
            f"{remedy}"
        )
    return rate
