"""Catalogs that nobody would write by hand: very large, repeating, endless, or made by chance."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gpuspawner.catalog.loader import Catalog
from gpuspawner.catalog.parser import schema
from gpuspawner.core.errors import ConfigError
from tests.support.tier import examples
from tests.unit.catalog.texts import VALIDATOR, refusal

KEYS = sorted(schema()["$defs"]["Environment"]["properties"])


def test_very_large_catalog_with_merge_keys_is_read() -> None:
    shared = "  - &base {slug: base, image: lab, mem_limit: 4G, cpu_limit: 2, links: {A: /a}}\n"
    others = (f"  - {{<<: *base, slug: e-{n}, allowed_groups: [g{n % 7}]}}\n" for n in range(7000))
    read = Catalog.from_text("environments:\n" + shared + "".join(others))
    assert len(read.environments) == 7001
    assert read.get("e-6999").mem_limit == 4 * 2**30
    assert len(read.visible_to(["g3"])) == 1001


def test_exponential_yaml_aliases_are_rejected() -> None:
    """Nine levels of ten aliases each: a thousand million values in a few lines."""
    bomb = "a0: &a0 {k: x}\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n"
        if n % 2
        else f"a{n}: &a{n} {{{', '.join(f'k{i}: *a{n - 1}' for i in range(10))}}}\n"
        for n in range(1, 10)
    )
    assert "aliases expand to too much text" in refusal(bomb)


def test_merge_keys_accept_only_mappings_and_stay_bounded() -> None:
    assert refusal("<<: 1") == (
        "catalog.yaml, line 1: only mappings can be merged with '<<'. Name one."
    )
    assert "only mappings can be merged" in refusal("<<: [{a: 1}, 2]")
    bomb = "a0: &a0 {k: x}\n" + "".join(
        f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}], k{n}: x}}\n" for n in range(1, 30)
    )
    assert "the catalog has an unknown key 'a0'" in refusal(bomb)
    wide = ", ".join(f"k{n}: x" for n in range(2000))
    assert "aliases expand" in refusal(f"a: &a {{{wide}}}\nb:\n" + "- {<<: *a}\n" * 2000)


def test_deep_or_self_referencing_yaml_is_rejected() -> None:
    for text in ("[" * 100_000, "{a: " * 100_000, "- " * 100_000, "? " * 5000):
        said = refusal(text)
        assert re.match(r"catalog.yaml, line 1: this is (nested too deeply|not valid)", said)
    loops = "a: &a {<<: *a}", "a: &a [*a]", "a: &a {b: {<<: *a}}", "a: &a {b: &b {<<: *a}, c: *b}"
    for text in loops:
        assert "refers to itself" in refusal(text)


@pytest.mark.parametrize("key", ["cpu_limit", "mem_limit", "shm_size", "min_memory", "devices"])
def test_out_of_range_numbers_are_rejected(key: str) -> None:
    sevens = "0o" + "7" * 9
    for number in ("0x" + "f" * 5000, "9" * 4000, "-" + "9" * 4000, "1e308", ".inf", sevens):
        value = f"{{max: {number}}}" if key == "devices" else number
        message = refusal(f"environments: [{{slug: a, image: b, {key}: {value}}}]")
        assert message.startswith("catalog.yaml, line 1: ")


# By chance.

words = st.one_of(
    st.sampled_from(["base", "a b", "", "../x", "x.md", "8G", "1", "<b>", "/lab", "12.4", "\x00"]),
    st.text(max_size=12),
)
values: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.dates(), words),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(words, st.sampled_from(["default", "max", "source"])), inner),
    ),
    max_leaves=6,
)
entries = st.builds(
    lambda said, more: said | more,
    st.fixed_dictionaries({}, optional={"slug": words, "image": words}),
    st.dictionaries(st.one_of(st.sampled_from(KEYS), words), values, max_size=5),
)
catalogs = st.fixed_dictionaries(
    {"environments": st.lists(entries, max_size=3)},
    optional={
        "datasets": st.dictionaries(words, values, max_size=2),
        "shared_folders": st.dictionaries(words, values, max_size=2),
    },
)


def assert_read_or_refused(text: str) -> None:
    """A catalog, or a sentence that names the file and, wherever there is one, the line."""
    try:
        Catalog.from_text(text)
    except ConfigError as error:
        assert error.message.startswith("catalog.yaml")
        lines = text.count("\n") + text.count("\r") + 1
        if found := re.match(r"catalog\.yaml, line (\d+): ", error.message):
            # YAML counts these as ends of lines too.
            lines += sum(text.count(end) for end in "\x85\u2028\u2029")
            assert 1 <= int(found[1]) <= lines + 1
        else:
            general = ("this is not valid YAML", "the catalog is", "the catalog has no")
            assert error.message.startswith(tuple(f"catalog.yaml: {words}" for words in general))


@given(st.one_of(catalogs, values))
def test_arbitrary_values_are_read_or_cleanly_rejected(data: Any) -> None:
    assert_read_or_refused(yaml.safe_dump(data, allow_unicode=True))


PIECES = """
environments: - slug:_a image:_b &x *x <<: { } [ ] , : ? !!int !!python/name:os.system !x | '
--- ... %YAML_1.1 # 0x1 2025-13-01 on ~ =
"""


pieces = st.sampled_from(["\n", "  ", "\t", " ", *PIECES.split()])


@given(
    st.one_of(
        st.text(max_size=200),
        st.lists(pieces, max_size=30).map(lambda some: " ".join(some).replace("_", " ")),
    )
)
@example("a: \x85b: [")
@example("\ufeff")
def test_arbitrary_text_is_read_or_cleanly_rejected(text: str) -> None:
    assert_read_or_refused(text)


# The JSON Schema and the parser accept the same catalogs.


BEYOND = re.compile(
    r"but 'max' is|means nothing|that is not defined|could not reach their files|starts without a "
    r"GPU unless|would hide|less than 1M|more than any machine|a control character|names no file"
)
"""Refusals that compare values or compute with them, which the schema cannot do."""

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
plain: st.SearchStrategy[Any] = st.one_of(
    scalars,
    st.lists(scalars, max_size=3),
    st.dictionaries(names, scalars, max_size=3),
    st.dictionaries(st.sampled_from(["default", "max"]), numbers, max_size=2),
    st.fixed_dictionaries(
        {"x": st.fixed_dictionaries({"choices": st.dictionaries(names, st.just({}), max_size=2)})}
    ),
)
alike = st.builds(
    lambda image, more: {"slug": "e", "image": image, **more},
    st.one_of(st.just("i"), texts),
    st.dictionaries(st.sampled_from(KEYS), plain, max_size=1),
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
    """Return what only the parser or only the schema refuses; empty if they agree."""
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
@given(alike)
def test_parser_and_schema_agree_on_entries(entry: dict[str, Any]) -> None:
    assert disagreement({"environments": [entry]}) == ""


@given(mounts, st.sampled_from(["datasets", "shared_folders"]))
@example({"a\n": {"source": "/srv/m"}}, "datasets")
def test_parser_and_schema_agree_on_mounts(found: dict[str, Any], key: str) -> None:
    assert disagreement({"environments": [{"slug": "e", "image": "i"}], key: found}) == ""
