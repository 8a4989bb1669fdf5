"""What DockerSpawner and hooks ask of the engine through the spawner. Real: a Docker Engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from traitlets.config import Config

from gpuspawner.cli.hub import open_hub
from tests.support.brokers import Clock
from tests.support.engine import PrivateEngine


def spawner_on(engine: PrivateEngine, tmp_path: Path, **settings: Any) -> Any:
    """A spawner of a hub that is configured and not started."""
    config = Config()
    config.JupyterHub.db_url = "sqlite://"
    config.JupyterHub.cookie_secret_file = f"{tmp_path}/jupyterhub_cookie_secret"
    config.JupyterHub.spawner_class = "gpuspawner.spawners.docker.GPUDockerSpawner"
    config.GPUDatabase.url = f"sqlite:///{tmp_path}/gpuspawner.sqlite"
    config.GPUDevices.source = "simulated:1xT4"
    config.DockerSpawner.client_kwargs = {"base_url": engine.url}
    config.DockerSpawner.update(settings)
    return open_hub(config).spawner


async def test_certificate_helper_container_is_created_unchanged(
    clean_engine: PrivateEngine, images: Any, tmp_path: Path
) -> None:
    """As ``internal_ssl`` asks for it, before the server's own container."""
    spawner = spawner_on(clean_engine, tmp_path)
    binds = {"certificates": {"bind": "/certs", "mode": "rw"}}
    host = spawner.client.create_host_config(binds=binds)
    helper = await spawner.docker(
        "create_container", images.SILENT, volumes=["/certs"], host_config=host
    )
    made = clean_engine.client.inspect_container(helper["Id"])
    assert made["Config"]["Image"] == images.SILENT
    assert made["HostConfig"]["Binds"] == ["certificates:/certs:rw"]
    assert not any(label.startswith("gpuspawner") for label in made["Config"]["Labels"] or ())


async def test_engine_call_runs_without_being_awaited(
    clean_engine: PrivateEngine, images: Any, tmp_path: Path
) -> None:
    """A synchronous hook may start a call and go on, as with DockerSpawner."""
    spawner = spawner_on(clean_engine, tmp_path)
    call = spawner.docker("create_volume", "made-by-a-hook")
    assert asyncio.isfuture(call)
    while not call.done():
        await asyncio.sleep(0.01)
    assert clean_engine.client.inspect_volume("made-by-a-hook")["Name"] == "made-by-a-hook"


async def test_server_was_seen_alive_when_the_engine_was_asked(
    clean_engine: PrivateEngine, images: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not when it answered: a server that ends meanwhile would be charged for the time since."""
    spawner = spawner_on(clean_engine, tmp_path)
    made = clean_engine.client.create_container(images.SILENT, name=spawner.object_name)
    clean_engine.client.start(made)
    spawner.touched = True
    clock = Clock()
    monkeypatch.setattr(spawner.services, "clock", clock)
    ask = spawner.get_object

    async def answer_late() -> Any:
        found = await ask()
        clock.forward(minutes=1)
        return found

    monkeypatch.setattr(spawner, "get_object", answer_late)
    asked_at = clock()
    assert await spawner.poll() is None
    assert clock() > asked_at
    assert spawner.seen_alive_at == asked_at
