"""The catalog: real YAML text and the file that we ship, parsed by the real reader."""

from __future__ import annotations

import copy
import re
from datetime import date
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from gpuspawner.catalog.loader import Catalog, load
from gpuspawner.catalog.models import DeviceLimits, Environment, Mount, SessionHours
from gpuspawner.core.errors import ConfigError, InvalidRequest, NotAllowed
from tests.unit.catalog.texts import DIGEST, by_schema, entry

SHIPPED = Path(__file__).parents[3] / "hub_config" / "catalog.yaml"

FULL = f"""
environments:
  - slug: pytorch
    display_name: PyTorch & friends
    summary: Training with <CUDA>.
    description: |
      Comes with **CUDA**.

      * one
    logo: /hub/static/logo.png
    image: registry.example.org:5000/lab/pytorch:2.5@{DIGEST}
    default: true
    frameworks:
      PyTorch: 2.5.1
      CUDA: "12.4"
    links:
      Guide: https://example.org/guide?a=b#c
      Ours: /services/docs/
      Mail: mailto:gpu@example.org
    maintainer: GPU team <gpu@example.org>
    tested_on: 2026-05-31
    packages: packages.txt
    sample_notebook: first/steps.ipynb
    changes: changes.md
    devices: {{default: 1, max: 4}}
    hours: {{default: 4, max: 12.5}}
    models: [A100, H100]
    min_memory: 40G
    min_driver: "550.54.14"
    min_cuda: "12.4"
    cpu_variant: false
    sharing: whole
    allowed_groups: [research, course]
    mem_limit: 32G
    cpu_limit: 8
    shm_size: 8G
    first_page: work/first steps.ipynb
    environment:
      HF_HOME: /datasets/models
    datasets: [imagenet]
    shared_folders: [research, notices]
    spawner_override:
      http_timeout: 120
      extra_host_config: {{init: true}}
  - slug: base
    image: base
    default_url: /lab/tree/work
datasets:
  imagenet:
    source: /srv/imagenet/
  models:
    source: hf_models
    target: /datasets/hf
    allowed_groups: [research]
shared_folders:
  research:
    source: /srv/research
    allowed_groups: [research]
  notices:
    source: /srv/notices
    target: /notices
    mode: ro
"""


def catalog(text: str) -> Catalog:
    return Catalog.from_text(dedent(text), "catalog.yaml")


def test_every_key_of_an_environment_is_read() -> None:
    assert by_schema(FULL) == []
    found = catalog(FULL).get("pytorch")
    assert found == Environment(
        slug="pytorch",
        display_name="PyTorch & friends",
        summary="Training with <CUDA>.",
        description="Comes with **CUDA**.\n\n* one",
        logo="/hub/static/logo.png",
        image=f"registry.example.org:5000/lab/pytorch:2.5@{DIGEST}",
        default=True,
        frameworks={"PyTorch": "2.5.1", "CUDA": "12.4"},
        links={
            "Guide": "https://example.org/guide?a=b#c",
            "Ours": "/services/docs/",
            "Mail": "mailto:gpu@example.org",
        },
        maintainer="GPU team <gpu@example.org>",
        tested_on=date(2026, 5, 31),
        packages="packages.txt",
        sample_notebook="first/steps.ipynb",
        changes="changes.md",
        devices=DeviceLimits(default=1, max=4),
        hours=SessionHours(default=4.0, max=12.5),
        models=("A100", "H100"),
        min_memory=40 * 10**9,
        min_driver="550.54.14",
        min_cuda="12.4",
        cpu_variant=False,
        sharing="whole",
        allowed_groups=frozenset({"research", "course"}),
        mem_limit=32 * 2**30,
        cpu_limit=8.0,
        shm_size=8 * 2**30,
        first_page="work/first steps.ipynb",
        environment={"HF_HOME": "/datasets/models"},
        datasets=("imagenet",),
        shared_folders=("research", "notices"),
        spawner_override={"http_timeout": 120, "extra_host_config": {"init": True}},
    )
    assert list(found.links) == ["Guide", "Ours", "Mail"], "in the order of the file"
    assert found.default_url == "/lab/tree/work/first%20steps.ipynb"
    base = catalog(FULL).get("base")
    assert (base.display_name, base.image, base.default_url) == ("base", "base", "/lab/tree/work")
    assert base == Environment(slug="base", image="base", default_url="/lab/tree/work")


def test_datasets_are_read_only_and_folders_writable_by_default() -> None:
    def mount(name: str, source: str, target: str, **more: Any) -> Mount:
        return Mount(name=name, source=source, target=target, **more)

    read = catalog(FULL)
    research = frozenset({"research"})
    assert read.datasets == (
        mount("imagenet", "/srv/imagenet", "/datasets/imagenet"),
        mount("models", "hf_models", "/datasets/hf", allowed_groups=research),
    )
    assert [m.is_volume for m in read.datasets] == [False, True]
    open_to_research: dict[str, Any] = {"read_only": False, "allowed_groups": research}
    assert read.shared_folders == (
        mount("research", "/srv/research", "/shared/research", **open_to_research),
        mount("notices", "/srv/notices", "/notices", read_only=True),
    )


def test_mounts_depend_on_environment_and_groups() -> None:
    read = catalog(FULL)
    pytorch, base = read.environments

    def names(environment: Environment, *groups: str) -> list[str]:
        return [mount.name for mount in read.mounts_for(environment, groups)]

    assert names(pytorch, "research") == ["imagenet", "research", "notices"]
    assert names(pytorch, "course") == ["imagenet", "notices"]
    assert names(base, "research") == ["imagenet", "models", "research", "notices"]
    assert names(base) == ["imagenet", "notices"]
    none = catalog(entry("datasets: []", "datasets: {images: {source: /srv/images}}\n"))
    assert none.mounts_for(none.get("base"), []) == ()


@pytest.mark.parametrize(
    ("devices", "limits"),
    [
        ("{max: 0}", (0, 0)),
        ("{max: 4}", (1, 4)),
        ("{default: 2}", (2, 2)),
        ("{default: 0}", (0, 1)),
        ("{default: 0, max: 2}", (0, 2)),
        ("{}", (1, 1)),
    ],
)
def test_missing_device_limit_is_derived_from_the_other(
    devices: str, limits: tuple[int, int]
) -> None:
    environment = catalog(entry(f"devices: {devices}")).get("base")
    assert environment.devices == DeviceLimits(default=limits[0], max=limits[1])
    assert environment.cpu_only == (limits[1] == 0)


@pytest.mark.parametrize(
    ("key", "written", "size"),
    [
        ("min_memory", "24G", 24 * 10**9),  # an RTX 4090 has a little more
        ("min_memory", "24GB", 24 * 10**9),
        ("min_memory", "24 GiB", 24 * 2**30),
        ("min_memory", "40000000000", 40 * 10**9),
        ("mem_limit", "1.5G", 3 * 2**29),
        ("mem_limit", "512m", 2**29),
        ("shm_size", "1T", 2**40),
        ("shm_size", "8Gi", 2**33),
    ],
)
def test_memory_sizes_are_parsed_into_bytes(key: str, written: str, size: int) -> None:
    assert getattr(catalog(entry(f"{key}: {written}")).get("base"), key) == size


def test_own_keys_override_merged_yaml_keys() -> None:
    read = catalog(
        """
        environments:
          - &base {slug: base, image: base, mem_limit: 4G, environment: &plain {A: x, B: x}}
          - {<<: *base, slug: big, mem_limit: 64G, environment: &more {<<: *plain, B: y}}
          - {<<: *base, slug: odd, environment: *more}
        """
    )
    assert [(e.slug, e.image, e.mem_limit) for e in read.environments] == [
        ("base", "base", 4 * 2**30),
        ("big", "base", 64 * 2**30),
        ("odd", "base", 4 * 2**30),
    ]
    assert read.get("odd").environment == read.get("big").environment == {"A": "x", "B": "y"}


# Asking the catalog.


def test_unknown_environment_error_suggests_alternatives() -> None:
    read = catalog(FULL)
    with pytest.raises(InvalidRequest) as caught:
        read.get("PyTorch2")
    assert caught.value.fields["field"] == "environment"
    assert caught.value.message == (
        "There is no environment 'PyTorch2' on this hub. Did you mean 'pytorch'?"
    )
    with pytest.raises(InvalidRequest, match="Choose one of: pytorch, base"):
        read.get("x")


def test_groups_decide_visible_usable_and_default_environments() -> None:
    nobodys = Environment.model_construct(slug="a", image="a", allowed_groups=frozenset())
    assert not nobodys.visible_to(["research"])
    read = catalog(FULL)
    assert [e.slug for e in read.visible_to(["course", "other"])] == ["pytorch", "base"]
    assert [e.slug for e in read.visible_to([])] == ["base"]
    assert read.get_for("pytorch", {"course"}).slug == "pytorch"
    with pytest.raises(NotAllowed, match="'pytorch': it is reserved for some groups"):
        read.get_for("pytorch", [])
    with pytest.raises(InvalidRequest) as caught:
        read.get_for("pytorc", [])
    assert "'pytorch'" not in caught.value.message
    assert "Choose one of: base" in caught.value.message

    read = catalog(FULL)
    assert read.default_for(["research"]).slug == "pytorch"
    assert read.default_for([]).slug == "base"
    closed = catalog(entry("allowed_groups: [staff]"))
    with pytest.raises(NotAllowed, match="You may not use any environment of this hub"):
        closed.default_for(["research"])


def test_catalog_can_come_from_defaults_or_a_mapping() -> None:
    read = Catalog.single(devices=DeviceLimits(default=1, max=2))
    only = read.default_for([])
    assert (only.slug, only.image, only.devices.max) == ("default", "", 2)
    assert read.get("default") is only
    assert read.mounts_for(only, ["any"]) == ()

    data: dict[str, Any] = {"environments": [{"slug": "a", "image": "i"}]}
    assert Catalog.from_mapping(data).get("a").image == "i"
    data["environments"][0]["imag"] = "j"
    with pytest.raises(ConfigError) as caught:
        Catalog.from_mapping(data, origin="c.GPUSpawner.catalog")
    assert caught.value.message.startswith("c.GPUSpawner.catalog: environment 'a' has an unknown")

    # As traitlets copies configuration, and as sets of environments need.
    read = catalog(FULL)
    assert copy.deepcopy(read) == read
    assert len({*read.environments, *copy.deepcopy(read).environments}) == 2


# The file.


def test_shipped_catalog_and_its_commented_examples_are_valid() -> None:
    """What the comments show works when an admin takes the '#' away."""
    read = load(SHIPPED)
    assert [(e.slug, e.devices) for e in read.environments] == [
        ("pytorch", DeviceLimits(default=1, max=4)),
        ("base", DeviceLimits(default=0, max=1)),
        ("cpu", DeviceLimits(default=0, max=0)),
    ]
    assert read.default_for([]).slug == "pytorch"
    text = SHIPPED.read_text(encoding="utf-8")
    settings = text[text.index("environments:\n") :]
    uncommented = re.sub(r"^#(?! \w)", "", settings, flags=re.MULTILINE)
    assert uncommented.count("\n#") < settings.count("\n#")
    read = Catalog.from_text(uncommented, "examples")
    large = read.get("large-models")
    assert large.models == ("A100", "H100")
    assert [m.name for m in read.mounts_for(large, ["research"])] == ["models", "research"]
    assert [m.name for m in read.datasets] == ["imagenet", "models"]


def test_unusable_catalog_file_is_named_in_the_error(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    with pytest.raises(ConfigError, match=r"mine\.yaml cannot be read: No such file"):
        load(path)
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load(tmp_path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="Save it as UTF-8"):
        load(path)
    path.write_text(entry("colour: red"), encoding="utf-8")
    with pytest.raises(ConfigError, match=f"^{path}, line 4: environment 'base' has an unknown"):
        load(path)
