"""Mistakes in a catalog: real YAML text, refused by the real reader with line and remedy."""

from __future__ import annotations

from textwrap import dedent

import pytest

from gpuspawner.catalog.loader import Catalog
from gpuspawner.core.errors import ConfigError


def entry(lines: str = "", top: str = "") -> str:
    """A catalog of one environment with these lines, the first of them on line 4."""
    body = "".join(f"    {line}\n" for line in dedent(lines).strip("\n").splitlines())
    return f"environments:\n  - slug: base\n    image: base\n{body}{top}"


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        Catalog.from_text(text, "catalog.yaml")
    return caught.value.message


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("displayname: X", "has an unknown key 'displayname'. Did you mean 'display_name'?"),
        ("devices: {maximum: 1}", "'devices' of environment 'base' has an unknown key 'maximum'"),
        ("devices: 2", "'devices' of environment 'base' is 2, not a mapping"),
        ("devices: {default: 3, max: 2}", "is 3, but 'max' is 2"),
        ("devices: {max: two}", "'max' of 'devices' of environment 'base' is 'two', not a whole"),
        ("devices: {max: -1}", "is -1, not a whole number"),
        ("devices: {max: true}", "is true, not a whole number"),
        ("devices: {max: 1.5}", "is 1.5, not a whole number"),
        ("hours: 8", "'hours' of environment 'base' is 8, not a mapping"),
        ("hours: {most: 8}", "'hours' of environment 'base' has an unknown key 'most'"),
        ("hours: {max: 0}", "'max' of 'hours' of environment 'base' is 0, not a number above"),
        ("hours: {max: -1}", "is -1, not a number above zero"),
        ("hours: {max: .nan}", "not a number above zero"),
        ("hours: {max: .inf}", "not a number above zero"),
        ("hours: {default: two}", "is 'two', not a number above zero"),
        ("hours: {max: 1000000000}", "is 1000000000 hours; 8760, a year, is the most"),
        ("hours: {default: 12, max: 8}", "is 12, but 'max' is 8. Lower the one or raise"),
        ("hours: {max: 8}\ndevices: {max: 0}", "so 'hours' means nothing"),
        ("default: 'yes'", "is 'yes'. Write true or false"),
        ("display_name: 5", "is 5, not text. Put it in quotes"),
        ("display_name: ''", "is empty"),
        ("description:", "has no value"),
        ("models: A100", "is 'A100', not a list"),
        ("models: [7]", "holds 7, which is no text"),
        ("models: ['-']", "names no device model"),
        ("models: []", "'models' of environment 'base' is empty"),
        ("models: [A100, A100]", "names 'A100' twice"),
        ("min_memory: lots", "is 'lots', not a size. Write one such as 8G"),
        ("min_memory: 24", "less than 1M. Write a unit"),
        ("mem_limit: 0", "is 0, not a size"),
        ("mem_limit: -8G", "is '-8G', not a size"),
        ("mem_limit: 8i", "is '8i', not a size"),
        ("cpu_limit: 0", "not a number above zero"),
        ("cpu_limit: .nan", "not a number above zero"),
        ("cpu_limit: .inf", "not a number above zero"),
        ("cpu_limit: true", "not a number above zero"),
        ("allowed_groups: []", "nobody is allowed. Leave it out to allow everyone"),
        ("allowed_groups:", "has no value"),
        ("allowed_groups: research", "is 'research', not a list"),
        ("default_url: lab", "Write a path that starts with one '/'"),
        ("default_url: //evil.example.org", "Write a path that starts with one '/'"),
        ("environment: [A=1]", "is a list, not a mapping"),
        ("environment: {NVIDIA_VISIBLE_DEVICES: all}", "'NVIDIA_VISIBLE_DEVICES' of environment"),
        ("environment: {CUDA_VISIBLE_DEVICES: '0'}", "is set by gpuspawner for every server"),
        ("environment: {GPUSPAWNER_LEASE: x}", "is set by gpuspawner"),
        ("environment: {JUPYTERHUB_USER: x}", "is set by gpuspawner"),
        ("environment: {A: 1}", "the variable 'A' of environment 'base' is 1, not text"),
        ("environment: {'A B': x}", "is no name of an environment variable"),
        ("datasets: [images]", "names a dataset 'images' that is not defined"),
        ("spawner_override: {image: other}", "the environment has a key of that name"),
        ("spawner_override: {device_requests: []}", "the lease decides which devices"),
        ("spawner_override: {volumes: {a: /b}}", "mounts come from 'datasets'"),
        ("spawner_override: {mounts: []}", "mounts come from 'datasets'"),
        ("spawner_override: {gpu_injection: cdi}", "decides how GPUs get into servers"),
        (
            "spawner_override: {extra_host_config: {privileged: true}}",
            "may not set 'privileged' in 'extra_host_config'",
        ),
        (
            "spawner_override: {extra_host_config: {device_requests: []}}",
            "may not set 'device_requests' in 'extra_host_config'",
        ),
        (
            "spawner_override: {extra_create_kwargs: {labels: {}}}",
            "may not set 'labels' in 'extra_create_kwargs'",
        ),
    ],
)
def test_a_mistake_in_an_environment_names_file_line_and_remedy(lines: str, words: str) -> None:
    message = refusal(entry(lines))
    assert message.startswith("catalog.yaml, line 4: ")
    assert words in message


@pytest.mark.parametrize(
    ("text", "where", "words"),
    [
        ("", "catalog.yaml", "the catalog has no 'environments'. Add it"),
        ("- a\n", "catalog.yaml", "the catalog is a list, not a mapping"),
        ("environments: []\n", "catalog.yaml, line 1", "Write at least one"),
        ("environments: {a: 1}\n", "catalog.yaml, line 1", "not a list of environments"),
        ("enviroments:\n- x\n", "catalog.yaml, line 1", "Did you misspell it 'enviroments'?"),
        ("environments:\n  - base\n", "catalog.yaml, line 2", "environment 1 is 'base'"),
        ("environments:\n  - image: x\n", "catalog.yaml, line 2", "environment 1 has no 'slug'"),
        ("environments:\n  - slug: x\n", "catalog.yaml, line 2", "'x' has no 'image'. Add it"),
        (
            "environments:\n  - slug: x\n    imgae: y\n",
            "catalog.yaml, line 3",
            "environment 'x' has no 'image'. Did you misspell it 'imgae'?",
        ),
        ("environments:\n  - slug: Py Torch\n", "catalog.yaml, line 2", "lowercase letters"),
        ("environments:\n  - slug: -x\n", "catalog.yaml, line 2", "lowercase letters"),
        ("environments:\n  - slug: x\n    image: ''\n", "catalog.yaml, line 3", "is empty"),
        ("environments:\n  - slug: x\n    image: -x\n", "catalog.yaml, line 3", "the name of an"),
        ("environments:\n  - slug: x\n    image: a b\n", "catalog.yaml, line 3", "the name of an"),
        (entry(top="extra: 1\n"), "catalog.yaml, line 4", "an unknown key 'extra'"),
        (
            entry(top="  - slug: base\n    image: b\n"),
            "catalog.yaml, line 4",
            "environments 1 and 2 have the same slug 'base'",
        ),
        (
            entry("default: true", "  - slug: b\n    image: b\n    default: true\n"),
            "catalog.yaml, line 7",
            "environments 'base' and 'b' both say 'default: true'",
        ),
        (
            entry("devices: {max: 0}\nmodels: [A100]"),
            "catalog.yaml, line 5",
            "is CPU-only (devices: max: 0), so 'models' means nothing",
        ),
        (
            entry("devices: {max: 0}\nmin_memory: 8G"),
            "catalog.yaml, line 5",
            "so 'min_memory' means nothing",
        ),
        (
            entry("environment:\n  A: x\n  CUDA_X: y"),
            "catalog.yaml, line 6",
            "the variable 'CUDA_X'",
        ),
        (
            entry("datasets:\n- images\n- imags", "datasets:\n  images: {source: /srv/i}\n"),
            "catalog.yaml, line 6",
            "a dataset 'imags' that is not defined under 'datasets'. Did you mean 'images'?",
        ),
    ],
)
def test_a_mistake_elsewhere_names_its_line(text: str, where: str, words: str) -> None:
    message = refusal(text)
    assert message.startswith(f"{where}: ")
    assert words in message


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (entry("image: twice"), 4, "the key 'image' was already written on line 3"),
        (entry("environment: {A: x, A: y}"), 4, "the key 'A' was already written on line 4"),
        (entry("environment: {1: x}"), 4, "the key 1 is no text. Put it in quotes"),
        (entry("environment: {on: x}"), 4, "the key on is no text"),
        (entry("environment: {[a]: x}"), 4, "the key here is no text"),
        (entry("environment: &a {A: *a}"), 4, "this value refers to itself"),
        (entry("description: 2025-13-01"), 4, "'2025-13-01' cannot be read as it stands"),
        (entry("description: !!int x"), 4, "'x' cannot be read"),
        (entry("description: !!python/name:os.system x"), 4, "not valid YAML"),
        (entry("description: 'open"), 5, "not valid YAML"),
        (entry("description: a: b"), 4, "not valid YAML"),
        (entry() + "---\n" + entry(), 4, "not valid YAML"),
    ],
)
def test_bad_yaml_is_reported_by_its_line(text: str, line: int, words: str) -> None:
    message = refusal(text)
    assert message.startswith(f"catalog.yaml, line {line}: ")
    assert words in message


def test_endless_nesting_is_reported() -> None:
    assert "nested too deeply" in refusal("[" * 3000)


def test_a_character_that_yaml_forbids_is_reported() -> None:
    assert refusal("a: \x00").startswith("catalog.yaml: this is not valid YAML")


# Datasets and shared folders.


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("{}", "dataset 'images' has no 'source'"),
        ("{source: relative/path}", "an absolute path on the host, or the name of a volume"),
        ("{source: /srv/../etc}", "the absolute path of one folder"),
        ("{source: /}", "the absolute path of one folder"),
        ("{source: //}", "the absolute path of one folder"),
        ("{source: //./}", "the absolute path of one folder"),
        ("{source: '/srv/a:/b'}", "the absolute path of one folder"),
        ("{source: '/srv/{username}'}", "names in braces are not filled in here"),
        ("{source: /srv/i, target: datasets}", "Write an absolute path such as"),
        ("{source: /srv/i, target: /datasets/../etc}", "Write an absolute path such as"),
        ("{source: /srv/i, target: /}", "would hide"),
        ("{source: /srv/i, target: //}", "would hide"),
        ("{source: /srv/i, target: /home/jovyan/work}", "would hide /home/jovyan/work"),
        ("{source: /srv/i, target: /home/jovyan/work/data}", "would hide /home/jovyan/work"),
        ("{source: /srv/i, target: /home/jovyan/}", "would hide /home/jovyan/work"),
        ("{source: /srv/i, target: //home/jovyan/./work}", "would hide /home/jovyan/work"),
        ("{source: /srv/i, target: /proc/1}", "would hide /proc"),
        ("{source: /srv/i, target: /sys}", "would hide /sys"),
        ("{source: /srv/i, target: /dev/shm}", "would hide /dev"),
        ("{source: /srv/i, mode: rw}", "has an unknown key 'mode'"),
        ("{source: /srv/i, allowed_groups: []}", "nobody is allowed"),
        ("/srv/i", "dataset 'images' is '/srv/i', not a mapping"),
    ],
)
def test_a_mistake_in_a_dataset_names_its_line(lines: str, words: str) -> None:
    message = refusal(entry(top=f"datasets:\n  images: {lines}\n"))
    assert message.startswith("catalog.yaml, line 5: ")
    assert words in message


def test_a_home_folder_beside_the_workspace_is_a_fine_target() -> None:
    read = Catalog.from_text(
        entry(top="datasets: {w: {source: /srv/w, target: /home/jovyan/workshop}}\n")
    )
    assert read.datasets[0].target == "/home/jovyan/workshop"


@pytest.mark.parametrize("target", ["/datasets/a", "/datasets/a/b", "/datasets", "//datasets/a/"])
def test_no_mount_hides_another(target: str) -> None:
    datasets = "datasets:\n  a: {source: /srv/a}\n"
    folders = f"shared_folders:\n  b:\n    source: /srv/b\n    target: {target}\n"
    message = refusal(entry(top=datasets + folders))
    assert message.startswith("catalog.yaml, line 9: ")
    assert "one would hide the other" in message


def test_the_mode_of_a_shared_folder_is_rw_or_ro() -> None:
    top = "shared_folders:\n  a: {source: /srv/a, mode: w}\n"
    assert "is 'w'. Write rw" in refusal(entry(top=top))


def test_a_mount_needs_a_usable_name() -> None:
    top = "datasets:\n  a/b: {source: /srv/a}\n"
    assert "dataset 'a/b' needs another name" in refusal(entry(top=top))
