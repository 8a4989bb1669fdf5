"""Schema and parser on values made by chance: what the one takes, the other takes."""

from __future__ import annotations

import re
from typing import Any

import jsonschema
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuspawner.catalog.json_schema import schema
from gpuspawner.catalog.loader import Catalog
from gpuspawner.core.errors import ConfigError
from tests.support.tier import examples

SCHEMA = schema()
ITEMS = SCHEMA["properties"]["environments"]["items"]["properties"]
KEYS = sorted(ITEMS)
VALIDATOR = jsonschema.Draft202012Validator(
    SCHEMA, format_checker=jsonschema.FormatChecker(["date"])
)

BEYOND = re.compile(
    r"but 'max' is|means nothing|that is not defined|could not reach their files|starts without a "
    r"GPU unless|would hide|less than 1M|more than any machine|a control character|names no file"
)
"""What needs more than one value to be judged, or arithmetic: not the schema's."""

PLAIN = """
a A 0 -a a- a.b a_b a/b a/../b ../a a..b .. . / // /a //a /a/../b /lab ~ lab notebook vscode a/x.py
.x.md x.md X.MD x.lock x.ipynb x.png x.svg x.exe x.py /x.md ./x.md a\\b.md a/x.md true whole shared
base base:1 base:1:2 h:5000/b h:5000/b:1 b@sha256:0 UPPER:x 8G 8 8GiB 1.5T 0 0G 1K 5M -1 1e9 8X
12.4 12 12.4.1.2 12.4.1.2.3 12. .4 v12 2026-05-31 2026-02-30 20260531 2026-W01-1 31.5.2026 https://a.b
http:// ftp://a mailto:a@b mailto:a javascript:x /x?y#z A100 NVIDIA_X CUDA_ cuda_x PATH X=Y rw ro
"""
WORDS = [word for line in PLAIN.splitlines() for word in line.split()]

texts = st.one_of(
    st.sampled_from(WORDS),
    st.sampled_from(WORDS).map(lambda word: f" {word} "),
    st.lists(st.sampled_from([*"aA09-_.:/@ \\~<\n\t\x7fü", "..", "\u2028"]), max_size=6).map(
        "".join
    ),
)
numbers = st.one_of(
    st.integers(-2, 20),
    st.sampled_from([0.5, 1.5, 8760, 8761, 999_999, 1_000_000, 2**60, 10**30, -0.5]),
)
scalars = st.one_of(texts, numbers, st.booleans())
names = st.one_of(texts, st.sampled_from(["default", "max", "choices", "source", "target", "mode"]))
values: st.SearchStrategy[Any] = st.one_of(
    scalars,
    st.lists(scalars, max_size=3),
    st.dictionaries(names, scalars, max_size=3),
    st.dictionaries(st.sampled_from(["default", "max"]), numbers, max_size=2),
    st.fixed_dictionaries(
        {"x": st.fixed_dictionaries({"choices": st.dictionaries(names, st.just({}), max_size=2)})}
    ),
)
entries = st.builds(
    lambda image, more: {"slug": "e", "image": image, **more},
    st.one_of(st.just("i"), texts),
    st.dictionaries(st.sampled_from(KEYS), values, max_size=1),
)
mounts = st.dictionaries(
    st.one_of(st.just("m"), texts),
    st.fixed_dictionaries(
        {"source": st.one_of(st.just("/srv/m"), texts)},
        optional={
            "target": texts,
            "mode": st.one_of(st.sampled_from(["rw", "ro"]), texts),
            "allowed_groups": st.lists(texts, max_size=2),
        },
    ),
    max_size=1,
)


def disagreement(data: Any) -> str:
    """What the one has against a catalog and the other has not; else empty."""
    said = ""
    try:
        Catalog.from_mapping(data)
    except ConfigError as error:
        said = error.message
    found = [error.message for error in VALIDATOR.iter_errors(data)]
    if said and not found and not BEYOND.search(said):
        return f"only the parser: {said}"
    return "" if said or not found else f"only the schema: {found}"


@settings(max_examples=examples(400), suppress_health_check=[HealthCheck.too_slow])
@given(entries)
def test_an_entry_is_right_or_wrong_for_both(entry: dict[str, Any]) -> None:
    assert disagreement({"environments": [entry]}) == ""


@given(mounts, st.sampled_from(["datasets", "shared_folders"]))
def test_a_mount_is_right_or_wrong_for_both(found: dict[str, Any], key: str) -> None:
    assert disagreement({"environments": [{"slug": "e", "image": "i"}], key: found}) == ""
