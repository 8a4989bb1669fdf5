"""Names of folders. Real: nothing but the rule."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuspawner.core.errors import InvalidRequest
from gpuspawner.storage.shared_folders import LONGEST, check_name, is_same, told_apart


@pytest.mark.parametrize(
    "name",
    [
        *("Thesis", "Klausur 2026 (neu)", "数据集", "данные", "بيانات", "दस्तावेज़", "Zoë's notes"),
        *("\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645", "1.2_final-version", "🚀 launch"),
    ],
)
def test_folder_names_in_any_script_are_kept(name: str) -> None:
    assert check_name(f"  {name} ") == unicodedata.normalize("NFC", name)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        *((name, "give the folder a name") for name in ("", "   ")),
        *((name, "begins with a letter or a digit") for name in ("..", ".ssh", "-rf", "\u200dx")),
        *((name, "'/' may not be in it") for name in ("../etc", "a/b")),
        *((name, "may not be in it") for name in ("a\\b", "a\nb", "a\x00b", "a\u202etxt.exe")),
        ("a:rw", "':' may not be in it"),
        ("{username}", "'{' may not be in it"),
        ("<script>", "'<' may not be in it"),
        ("x" * (LONGEST + 1), "the maximum is 60"),
        *((name, "is text") for name in (7, None)),
    ],
)
def test_invalid_folder_name_is_rejected_with_a_reason(name: object, says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_name(name)
    assert says in refused.value.message
    assert refused.value.message.isprintable()


@given(st.text(max_size=80))
def test_accepted_folder_name_is_one_safe_path_component(text: str) -> None:
    try:
        name = check_name(text)
    except InvalidRequest as error:
        assert error.message.isprintable()
        return
    assert check_name(name) == name
    assert not set(name) & set("/\\:\x00") and name not in (".", "..")
    assert len(f"{name} (01234567)".encode()) <= 255


@given(
    st.lists(
        st.sampled_from(["Data", "data", "\uff24\uff21\uff34\uff21", "x", "x (00000001)"]),
        max_size=9,
    )
)
def test_folders_of_the_same_name_get_distinct_labels(names: list[str]) -> None:
    ids = [f"{number:08x}" for number in range(len(names))]
    called = told_apart(zip(ids, names, strict=True))
    assert list(called) == ids
    labels = list(called.values())
    assert not any(is_same(one, other) for n, one in enumerate(labels) for other in labels[n + 1 :])
    if names:
        assert called[ids[0]] == names[0]
