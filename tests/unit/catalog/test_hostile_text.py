"""Catalogs that nobody would write by hand: very large, repeating, endless, or made by chance."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from gpuspawner.catalog.loader import Catalog
from gpuspawner.catalog.parser import schema
from gpuspawner.core.errors import ConfigError
from tests.unit.catalog.texts import refusal

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
