"""Mistakes in a catalog: the parser names line and remedy, and the schema marks them in editors."""

from __future__ import annotations

import pytest

from tests.unit.catalog.texts import by_parser, by_schema, entry, refusal


def rows(text: str) -> list[tuple[str, str]]:
    """Lines of an entry, and words of what is said of them."""
    pairs = [line.split(" => ") for line in text.strip().splitlines()]
    return [(lines.replace(r"\n", "\n"), words) for lines, words in pairs]


FOR_BOTH = r"""
displayname: X => has an unknown key 'displayname'. Did you mean 'display_name'?
summary: 5 => is 5, not text
display_name: 5 => is 5, not text. Put it in quotes
display_name: ' ' => is empty
description: => has no value
default: 'yes' => is 'yes'. Write true or false
logo: logo.exe => Name a file that ends in .png or
logo: ../logo.png => without '..'
logo: /../etc/logo.png => Write a path that starts with one '/'
logo: //example.org/a.png => Write a path that starts with one '/'
frameworks: [PyTorch] => is a list, not a mapping
frameworks: {PyTorch: 2.10} => is 2.1, a number. Put it in quotes
frameworks: {PyTorch: } => has no value
frameworks: {' ': '1'} => the name ' ' in 'frameworks' of environment 'base' is empty
links: {Guide: javascript:alert(1)} => Write an address such as
links: {Guide: //example.org} => Write a path that starts with one '/'
links: {Guide: guide} => Write an address such as
links: {Guide: 'https:///x'} => Write an address such as
tested_on: yesterday => not a date. Write one such as 2026-05-31
tested_on: '2026-02-30' => not a date
tested_on: 2026 => is 2026, not a date
packages: ../x.txt => without '..'
packages: /etc/x.txt => without '..'
packages: x.yaml => Name a file that ends in .txt or .lock
sample_notebook: x.py => Name a file that ends in .ipynb
changes: [a.md] => is a list, not text
devices: 2 => 'devices' of environment 'base' is 2, not a mapping
devices: {maximum: 1} => 'devices' of environment 'base' has an unknown key 'maximum'
devices: {max: two} => 'max' of 'devices' of environment 'base' is 'two', not a whole
devices: {max: -1} => is -1; 0 is the least. Write more
devices: {max: 1.5} => is 1.5, not a whole number
hours: 8 => 'hours' of environment 'base' is 8, not a mapping
hours: {max: 0} => 'max' of 'hours' of environment 'base' is 0, not above 0
hours: {default: two} => is 'two', not a usable number
hours: {max: 1000000000} => is 1000000000; 8760 is the most. Write less
models: A100 => is 'A100', not a list
models: [7] => holds 7, which is not text
models: ['-'] => names no device model
models: [] => 'models' of environment 'base' is empty
models: [A100, A100] => names 'A100' twice
min_memory: lots => is 'lots', not a size. Write one such as 8G
min_memory: 24 => less than 1M. Write a unit
mem_limit: 0 => is 0, not a size
mem_limit: -8G => is '-8G', not a size
cpu_limit: 0 => is 0, not above 0
cpu_limit: .inf => is inf, not a usable number
min_driver: 550 => is 550, not text
min_driver: new => not a version. Write one such as '12.4'
min_cuda: 12.4 => is 12.4, not text
cpu_variant: no thanks => Write true or false
sharing: shared => is 'shared'. Write 'whole', 'slot' or 'any'
allowed_groups: [] => nobody is allowed. Leave it out to allow everyone
allowed_groups: => has no value
allowed_groups: research => is 'research', not a list
first_page: desktop => Write lab, notebook, vscode, or a file
first_page: ../x.ipynb => without '..'
default_url: lab => Write a path that starts with one '/'
default_url: /../x => Write a path that starts with one '/'
environment: [A=1] => is a list, not a mapping
environment: {NVIDIA_VISIBLE_DEVICES: all} => 'NVIDIA_VISIBLE_DEVICES' in 'env
environment: {cuda_x: '1'} => is set by gpuspawner
environment: {GPUSPAWNER_LEASE: x} => is set by gpuspawner
environment: {JUPYTERHUB_USER: x} => is set by gpuspawner
environment: {A: 1} => 'A' of 'environment' of environment 'base' is 1, not text
environment: {'A B': x} => is not the name of an environment variable
spawner_override: {image: other} => the environment has a key of that name
spawner_override: {device_requests: []} => the lease decides which devices
spawner_override: {volumes: {a: /b}} => mounts come from 'datasets'
spawner_override: {gpu_injection: cdi} => decides how GPUs get into servers
spawner_override: {extra_host_config: {privileged: true}} => 'privileged' in 'extra_host_config'
spawner_override: {extra_host_config: {device_requests: []}} => may not set 'device_requests' in
spawner_override: {extra_create_kwargs: {labels: {}}} => 'labels' in 'extra_create_kwargs'
profile_options: [memory] => is a list, not a mapping
profile_options: {memory: {}} => option 'memory' has no 'choices'
profile_options: {memory: {choices: {}}} => 'choices' of option 'memory' is empty
profile_options: {memory: {choices: {x: {}}, unlisted_choice: {}}} => key 'unlisted_choice'
profile_options: {m: {choices: {x: {devices: {max: 2}}}}} => choice 'x' has an unknown key 'devices'
profile_options: {m: {choices: {x: {kubespawner_override: {}}}}} => Did you mean 'spawner_override'?
profile_options: {m: {choices: {x: {spawner_override: {volumes: {}}}}}} => may not set 'volumes'
profile_options: {'a b': {choices: {x: {}}}} => the name 'a b' in 'profile_options' of environment
profile_options: {a: {choices: {'x=y': {}}}} => the name 'x=y' in 'choices' of option 'a' cannot be
"""
MANY = "{" + ", ".join(f"o{n}: {{choices: {{x: {{}}}}}}" for n in range(11)) + "}"
LONG = [
    ("summary: " + "x" * 201, "has 201 characters. Shorten it to 200"),
    ("description: " + "x" * 20_001, "has 20001 characters. Shorten it to 20000"),
    (
        "links: {" + ", ".join(f"l{n}: /x" for n in range(51)) + "}",
        "51 entries; at most 50 are allowed",
    ),
    (f"profile_options: {MANY}", "at most 10"),
    ("first_page: lab\ndefault_url: /lab", "has both 'first_page' and 'default_url'"),
]


@pytest.mark.parametrize(("lines", "words"), [*rows(FOR_BOTH), *LONG])
def test_entry_error_names_line_and_remedy(lines: str, words: str) -> None:
    message = refusal(entry(lines))
    assert message.startswith("catalog.yaml, line 4: ") and words in message
    assert by_schema(entry(lines))


def test_control_characters_in_a_summary_are_rejected() -> None:
    for mark in ("n", "u202e", "u2028", "x1b", "x85", "u2066", "t"):
        text = entry(f'summary: "a\\{mark}b"')
        assert "with a line break or a control character" in refusal(text)
        assert by_schema(text)


FOR_THE_PARSER = r"""
devices: {default: 3, max: 2} => is 3, but 'max' is 2
hours: {max: .nan} => is nan, not a usable number. Write one such as
hours: {default: 12, max: 8} => is 12, but 'max' is 8. Lower the one or raise
hours: {max: 8}\ndevices: {max: 0} => so 'hours' means nothing
cpu_limit: .nan => is nan, not a usable number
datasets: [images] => names a dataset 'images' that is not defined
shared_folders: [none] => a shared folder 'none' that is not defined
cpu_variant: false => they could not reach their files
cpu_variant: false\ndevices: {default: 0} => starts without a GPU unless a member
devices: {max: 0}\nmodels: [A100] => is CPU-only (devices: max: 0), so 'models' means nothing
devices: {max: 0}\nmin_memory: 8G => so 'min_memory' means nothing
devices: {max: 0}\nsharing: any => so 'sharing' means nothing
devices: {max: 2}\nsharing: slot => Leave out 'max', or write 'sharing: any'
profile_options: {m: {choices: {x: {default: true}, y: {default: true}}}} => 'x' and 'y', which both
"""


@pytest.mark.parametrize(("lines", "words"), rows(FOR_THE_PARSER))
def test_errors_beyond_the_schema_are_found_by_the_parser(lines: str, words: str) -> None:
    """The module of the schema says so; editors do not see these."""
    message = refusal(entry(lines))
    assert message.startswith(("catalog.yaml, line 4: ", "catalog.yaml, line 5: "))
    assert words in message
    assert by_schema(entry(lines)) == []


OPEN = "  - {slug: b, image: b}\n"


@pytest.mark.parametrize(
    ("lines", "rest", "words"),
    [
        ("cpu_variant: false", OPEN, ""),
        ("cpu_variant: false", "  - {slug: b, image: b, devices: {max: 0}}\n", ""),
        (
            "cpu_variant: false\nallowed_groups: [a]",
            "  - {slug: b, image: b, allowed_groups: [a, c]}\n",
            "",
        ),
        (
            "cpu_variant: false",
            "  - {slug: b, image: b, allowed_groups: [a]}\n",
            "no other that starts",
        ),
    ],
)
def test_gpu_only_environment_requires_a_cpu_alternative(lines: str, rest: str, words: str) -> None:
    said = by_parser(entry(lines, rest))
    assert words in said and bool(said) is bool(words)
    assert by_schema(entry(lines, rest)) == []


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("", 0, "the catalog has no 'environments'. Add it"),
        ("- a\n", 0, "the catalog is a list, not a mapping"),
        ("environments: []\n", 1, "Write at least one"),
        ("environments: {a: 1}\n", 1, "is a mapping, not a list"),
        ("enviroments:\n- x\n", 1, "Did you mean 'environments'?"),
        ("environments:\n  - base\n", 2, "environment 1 is 'base'"),
        ("environments:\n  - image: x\n", 2, "environment 1 has no 'slug'"),
        ("environments:\n  - slug: x\n", 2, "'x' has no 'image'. Add it"),
        ("environments:\n  - slug: x\n    imgae: y\n", 3, "'imgae'. Did you mean 'image'?"),
        ("environments:\n  - slug: Py Torch\n", 2, "lowercase letters"),
        ("environments:\n  - slug: -x\n", 2, "lowercase letters"),
        *(
            (f"environments:\n  - slug: x\n    image: {image}\n", 3, words)
            for image, words in (
                ("''", "is empty"),
                ("-x", "the name of an"),
                ("a b", "the name of an"),
                ("'base:'", "not the name of an image"),
                ("base@sha256:0123", "with its digest as registry/name:tag@sha256:"),
                ("base:1:2", "not the name of an image"),
                ("base@md5:00", "not the name of an image"),
            )
        ),
        (entry(top="extra: 1\n"), 4, "an unknown key 'extra'"),
        (
            entry("environment:\n  A: x\n  CUDA_X: y"),
            6,
            "the name 'CUDA_X' in 'environment' of environment",
        ),
    ],
)
def test_structure_errors_name_their_line(text: str, line: int, words: str) -> None:
    assert_names_line(text, line, words)
    assert by_schema(text)


def assert_names_line(text: str, line: int, words: str) -> None:
    message = refusal(text)
    assert message.startswith(f"catalog.yaml, line {line}: " if line else "catalog.yaml: ")
    assert words in message


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (entry(top=OPEN.replace("b,", "base,")), 4, "1 and 2 have the same slug 'base'"),
        (
            entry("default: true", "  - {slug: b, image: b, default: true}\n"),
            5,
            "environments 'base' and 'b' both say 'default: true'",
        ),
        (
            entry("datasets:\n- images\n- imags", "datasets:\n  images: {source: /srv/i}\n"),
            6,
            "a dataset 'imags' that is not defined under 'datasets'. Did you mean 'images'?",
        ),
        (entry("image: twice"), 4, "the key 'image' was already written on line 3"),
        (entry("environment: {A: x, A: y}"), 4, "the key 'A' was already written on line 4"),
        (entry("environment: {1: x}"), 4, "the key 1 is not text. Put it in quotes"),
        (entry("environment: {on: x}"), 4, "the key on is not text"),
        (entry("environment: {[a]: x}"), 4, "the key here is not text"),
        (entry("environment: &a {A: *a}"), 4, "this value refers to itself"),
        (entry("description: 2025-13-01"), 4, "'2025-13-01' cannot be read as it stands"),
        (entry("description: !!int x"), 4, "'x' cannot be read"),
        (entry("description: !!python/name:os.system x"), 4, "not valid YAML"),
        (entry("description: 'open"), 5, "not valid YAML"),
        (entry("description: a: b"), 4, "not valid YAML"),
        (entry() + "---\n" + entry(), 4, "not valid YAML"),
        ("a: \x00", 0, "this is not valid YAML"),
    ],
)
def test_yaml_and_reference_errors_name_their_line(text: str, line: int, words: str) -> None:
    assert_names_line(text, line, words)


# Datasets and shared folders.

MOUNTS = r"""
{} => dataset 'images' has no 'source'
{source: relative/path} => an absolute path on the host, or the name of a volume
{source: /srv/../etc} => the absolute path of one folder
{source: /} => the absolute path of one folder
{source: '/srv/a:/b'} => the absolute path of one folder
{source: '/srv/{username}'} => names in braces are not filled in here
{source: /srv/i, target: datasets} => Write an absolute path such as
{source: /srv/i, target: /datasets/../etc} => Write an absolute path such as
{source: /srv/i, target: /} => would hide
{source: /srv/i, target: /home/jovyan/work} => would hide /home/jovyan/work
{source: /srv/i, target: /home/jovyan/work/data} => would hide /home/jovyan/work
{source: /srv/i, target: //home/jovyan/./work} => would hide /home/jovyan/work
{source: /srv/i, target: /proc/1} => would hide /proc
{source: /srv/i, target: /dev/shm} => would hide /dev
{source: /srv/i, mode: rw} => has an unknown key 'mode'
{source: /srv/i, allowed_groups: []} => nobody is allowed
/srv/i => dataset 'images' is '/srv/i', not a mapping
"""


@pytest.mark.parametrize(("lines", "words"), rows(MOUNTS))
def test_dataset_error_names_its_line(lines: str, words: str) -> None:
    text = entry(top=f"datasets:\n  images: {lines}\n")
    message = refusal(text)
    assert message.startswith("catalog.yaml, line 5: ") and words in message
    assert bool(by_schema(text)) is ("hide" not in words), "what it would hide, the parser knows"


@pytest.mark.parametrize(
    ("top", "words"),
    [
        ("datasets: {w: {source: /srv/w, target: /home/jovyan/workshop}}", ""),
        ("datasets: {a: {source: volume-1, target: /a/b, allowed_groups: [g]}}", ""),
        ("shared_folders: {a.b: {source: /srv/a, mode: ro}}", ""),
        ("datasets: [a]", "is a list, not a mapping"),
        ("shared_folders: {a: {source: /srv/a, mode: w}}", "is 'w'. Write 'rw'"),
        (
            "datasets: {a/b: {source: /srv/a}}",
            "'a/b' in 'datasets' of the catalog cannot be used. Use letters",
        ),
    ],
)
def test_mount_names_and_modes_are_validated(top: str, words: str) -> None:
    text = entry(top=f"{top}\n")
    said = by_parser(text)
    assert words in said and bool(said) is bool(words) is bool(by_schema(text))


def test_overlapping_mount_targets_are_rejected() -> None:
    for target in ("/datasets/a", "/datasets/a/b", "/datasets", "//datasets/a/"):
        folders = f"shared_folders:\n  b:\n    source: /srv/b\n    target: {target}\n"
        said = refusal(entry(top=f"datasets:\n  a: {{source: /srv/a}}\n{folders}"))
        assert said.startswith("catalog.yaml, line 9: ") and "one would hide the other" in said
