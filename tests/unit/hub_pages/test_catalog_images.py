"""The admins' page of the catalog: what it asks of engines and registries, and what it says of the
answers. Real: threads, the page's template."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import partial

import jinja2
import pytest

from gpuspawner.catalog.models import DeviceLimits, Environment
from gpuspawner.engines.images import ImageState
from gpuspawner.hub_pages.catalog_images import (
    Found,
    SeenImage,
    answers_in_time,
    outdated,
    seen_images,
)
from gpuspawner.web.frame import OUR_TEMPLATES
from tests.support.page_text import text_of

HERE, MISSING = ImageState("lab:1", 5, "sha256:a"), ImageState("lab:1", None, "")
NEWER = ImageState("lab:1", 5, "sha256:a", offered="sha256:b")
LAB = Environment(slug="lab", image="lab:1", devices=DeviceLimits(default=1, max=2))


@pytest.fixture
def answered() -> Iterator[threading.Event]:
    """Set at the end of a test, for threads that wait for it."""
    event = threading.Event()
    yield event
    event.set()


async def test_all_are_asked_at_once() -> None:
    together = threading.Barrier(3)
    calls = {name: lambda: together.wait(60) >= 0 for name in ("one", "two", "three")}
    assert await answers_in_time(calls, 60.0) == dict.fromkeys(calls, True)
    assert await answers_in_time({}, 60.0) == {}


async def test_call_that_hangs_is_left_out(answered: threading.Event) -> None:
    assert await answers_in_time({"slow": lambda: answered.wait(60)}, 0.05) == {}


async def test_unexpected_error_is_not_taken_for_silence() -> None:
    with pytest.raises(ZeroDivisionError):
        await answers_in_time({"one": lambda: 1 // 0}, 60.0)


def seen(environment: Environment) -> list[SeenImage]:
    found = {name: {"lab:1": HERE if name != "c" else MISSING} for name in ("", "a", "b", "c")}
    return list(seen_images(found, environment, "lab:1", is_cluster=True))


def test_image_is_shown_only_where_servers_of_its_environment_run() -> None:
    hub = SeenImage(HERE, False, ("",))
    nodes = [SeenImage(HERE, True, ("a", "b")), SeenImage(MISSING, True, ("c",))]
    assert seen(LAB) == [hub, *nodes]
    with_gpu = LAB.model_copy(update={"cpu_variant": False})
    assert seen(with_gpu) == nodes
    without = Environment(slug="lab", image="lab:1", devices=DeviceLimits(default=0, max=0))
    assert seen(without) == [hub]
    alone = seen_images({"": {"lab:1": HERE}}, with_gpu, "lab:1", is_cluster=False)
    assert list(alone) == [hub]


def page(found: Found, engines: Sequence[str], policy: str) -> str:
    """The words of the page with one environment."""
    frame = {
        "gpuspawner/styled.html": "{% block main %}{% endblock %}{% block script %}{% endblock %}"
    }
    ours = jinja2.FileSystemLoader(OUR_TEMPLATES)
    loader = jinja2.ChoiceLoader([jinja2.DictLoader(frame), ours])
    template = jinja2.Environment(loader=loader, autoescape=True).get_template("catalog_state.html")
    seen = partial(seen_images, found, is_cluster=len(engines) > 1)
    silent = [name for name in engines if name not in found]
    values = {"engines": engines, "silent": silent, "seen": seen, "environments": [LAB]}
    values |= {"jobs": [], "outdated": outdated(found, [LAB])}
    return text_of(template.render(policy_of=lambda each: policy, **values))


@pytest.mark.parametrize(
    ("state", "policy", "on_hub", "on_node"),
    [
        *(
            (MISSING, policy, "missing the first start waits for its download", "one of its GPUs")
            for policy in ("ifnotpresent", "always")
        ),
        *(
            (MISSING, policy, "missing a start fails: pulling is off", "no server starts there")
            for policy in ("never", "skip")
        ),
        (NEWER, "always", "newer image sha256:b… the next start downloads it", "newer image"),
        (NEWER, "ifnotpresent", "newer image sha256:b… Check for newer", "newer image"),
    ],
)
def test_state_of_an_image_says_what_its_pull_policy_makes_of_it(
    state: ImageState, policy: str, on_hub: str, on_node: str
) -> None:
    assert f"lab:1 {on_hub}" in page({"": {"lab:1": state}}, [""], policy)
    text = page({"": {"lab:1": HERE}, "a": {"lab:1": state}}, ["", "a"], policy)
    assert "lab:1 the hub's machine: here a: " in text and on_node in text


def test_engines_that_do_not_answer_are_named() -> None:
    alone = page({}, [""], "ifnotpresent")
    assert "The Docker Engine is not responding, so the images cannot be seen." in alone
    assert "lab:1 not known" in alone and "Check for newer images" not in alone
    some = page({"a": {"lab:1": HERE}}, ["", "a", "b"], "ifnotpresent")
    assert "so their images cannot be seen: the hub's machine, b." in some
    assert "lab:1 a: here" in some and "Check for newer images" in some
