"""How long each choice of the form would wait, in a sentence. Pure but for what it is given."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import product

from ..broker.outlook import Outlook
from ..catalog import Environment
from ..model import Request
from .cards import waiting
from .prices import MOST_CHOICES, Tables

Ask = Callable[[Mapping[str, Request]], Mapping[str, Outlook]]


def wait_tables(
    environments: Sequence[Environment], counts: Sequence[int], models: Sequence[str], ask: Ask
) -> Tables:
    """A sentence for each choice, by ``gpus|model`` as the form has them.

    ``ask`` tells how requests would fare (:meth:`gpuspawner.broker.Broker.outlooks`).
    """
    alike: dict[Hashable, list[Environment]] = {}
    for environment in environments:
        if not environment.cpu_only:
            terms = (environment.devices, environment.models, environment.min_memory)
            alike.setdefault(terms, []).append(environment)
    gpus = ["", *(str(count) for count in counts)]
    if len(alike) * len(gpus) * (1 + len(models)) > MOST_CHOICES:
        return Tables({}, ())
    requests = {
        f"{at}|{number}|{model}": _request(some[0], number, model)
        for at, some in enumerate(alike.values())
        for number, model in product(gpus, ["", *models])
    }
    outlooks = ask({name: request for name, request in requests.items() if request.devices})
    tables: list[dict[str, str]] = [{} for _ in alike]
    for name, outlook in outlooks.items():
        at, _, choice = name.partition("|")
        tables[int(at)][choice] = sentence(outlook)
    return Tables(
        {e.slug: at for at, some in enumerate(alike.values()) for e in some}, tuple(tables)
    )


def sentence(outlook: Outlook) -> str:
    """``Expect to wait about 25 min in line.``; empty where no device fits at all."""
    if outlook.at_once:
        return "Starts at once."
    if not outlook.total:
        return ""
    wait = waiting(outlook).removesuffix(" wait")
    if wait.startswith(("about", "at most")):
        return f"Not enough are free now: expect to wait {wait} in line."
    return "Not enough are free now: you would wait in line."


def _request(environment: Environment, number: str, model: str) -> Request:
    count = int(number) if number else environment.devices.default
    if not 0 < count <= environment.devices.max:
        return Request()
    return Request(
        devices=count,
        model=model or None,
        models=environment.models,
        memory_bytes=environment.min_memory,
    )
