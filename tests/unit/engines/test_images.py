"""How far a pull is, and why it failed, from what an engine says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from gpuspawner.cli.output import bar
from gpuspawner.core.errors import ImageUnavailable
from gpuspawner.engines.images import PullProgress, pull, split_image, unavailable
from gpuspawner.spawners.progress import sentences

DIGEST = "sha256:" + "0" * 64


@pytest.mark.parametrize(
    "image, parts",
    [
        ("lab", ("lab", "latest")),
        ("lab:1", ("lab", "1")),
        ("host:5000/lab", ("host:5000/lab", "latest")),
        ("host:5000/team/lab:1", ("host:5000/team/lab", "1")),
        (f"lab@{DIGEST}", ("lab", DIGEST)),
        (f"host:5000/lab:1@{DIGEST}", ("host:5000/lab", DIGEST)),
    ],
)
def test_image_name_is_split_into_repository_and_version(
    image: str, parts: tuple[str, str]
) -> None:
    assert split_image(image) == parts


class Engine:
    """The one call of a client that a pull makes; its answers are an engine's own words."""

    def __init__(self, events: Sequence[dict[str, Any]]) -> None:
        self.events = events

    def __call__(self, timeout: float) -> Engine:
        return self

    def post(self, *_: Any, **__: Any) -> None:
        """Nothing is sent."""

    def close(self) -> None:
        """Nothing is open."""

    def pull(self, *_: Any, **__: Any) -> Iterator[dict[str, Any]]:
        return iter(self.events)


def layer(name: str, status: str, *bytes_: int) -> dict[str, Any]:
    detail = {"current": bytes_[0], "total": bytes_[1]} if bytes_ else {}
    return {"id": name, "status": status, "progressDetail": detail}


def test_pull_progress_sums_all_layers() -> None:
    events = [
        {"id": "1", "status": "Pulling from lab"},
        layer("a", "Already exists"),
        layer("b", "Pulling fs layer"),
        layer("c", "Pulling fs layer"),
        layer("b", "Downloading", 10, 100),
        layer("c", "Downloading", 300, 300),
        layer("b", "Download complete"),
        layer("b", "Extracting", 50, 100),
        layer("b", "Pull complete"),
        {"status": f"Digest: {DIGEST}"},
    ]
    seen = list(pull(Engine(events), "lab:1"))
    assert seen[3] == PullProgress(done=1, layers=3, got=10, size=100)
    assert seen[4] == PullProgress(1, 3, 310, 400)
    assert seen[-1] == PullProgress(2, 3, 400, 400)
    times = iter(range(100))
    told = list(sentences("lab:1", iter(seen), lambda: next(times)))
    assert told[4] == "Pulling lab:1: 1 of 3 layers, 0 of 0 MB"
    assert told[-1] == "The image lab:1 is here"
    assert bar("lab", PullProgress(1, 4, 40_000_000, 80_000_000)) == (
        "lab [############------------]  50%  40 of 80 MB, 1 of 4 layers"
    )
    assert bar("lab", PullProgress(0, 0, 0, 0)).endswith("   0%  0 of 0 layers")


@pytest.mark.parametrize(
    "said, why",
    [
        ("write /var/lib/docker/tmp/x: no space left on device", "disk is full"),
        ("manifest for lab:9 not found: manifest unknown: manifest unknown", "no such image"),
        ("pull access denied for lab, repository does not exist or may require", "no such image"),
        ("unauthorized: authentication required", "wants a sign-in"),
        ("filesystem layer verification failed for digest sha256:1", "not what the digest says"),
        ("manifest verification failed for digest sha256:1", "not what the digest says"),
        ("Get https://x/v2/: dial tcp: lookup x: no such host", "is not responding"),
        ("unexpected EOF", "stopped in the middle"),
        ("something new\n  of the engine.", "could not be pulled: something new of the engine. "),
    ],
)
def test_engine_pull_errors_become_clear_reasons(said: str, why: str) -> None:
    assert why in unavailable("lab:9", said).message
    with pytest.raises(ImageUnavailable) as refused:
        list(pull(Engine([layer("a", "Waiting"), {"error": said}]), "lab:9"))
    assert refused.value.message == unavailable("lab:9", said).message
