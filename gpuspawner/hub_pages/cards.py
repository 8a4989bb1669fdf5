"""The cards and pages of environments, with sample notebooks and waiting times.

A notebook's code does not run and its HTML is not used: Markdown is sanitized as in the catalog,
and outputs are shown as text or pictures only.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import lru_cache
from itertools import islice, product
from pathlib import Path
from typing import Any, TypeVar

from markupsafe import Markup

from ..catalog import parser
from ..catalog.loader import Catalog
from ..catalog.markdown import first_words, to_html
from ..catalog.models import Environment
from ..catalog.value_kinds import LOGO_TYPES
from ..core.units import format_bytes, format_cores, format_devices, format_memory
from ..devices.snapshots import Overview, ShareCount
from ..leases.host_resources import NOTHING, HostAmount, guaranteed_to
from ..leases.models import SHARE, Request, Sharing
from ..ledger.rules import format_time_left
from ..queue.positions import Outlook
from .choice_tables import MOST_CHOICES, MemoryChoice, Tables, choice_key, group_alike
from .prices import PriceList

MOST_CELLS = 200
MOST_TEXT = 20_000
"""Maximum number of characters shown of one cell or output."""
MOST_PICTURES = 100_000
"""Maximum number of base64 characters for all pictures of a notebook together."""

_PICTURES = ("image/png", "image/jpeg", "image/gif")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Output:
    """An output of a cell: text, or a picture as a ``data:`` URL."""

    text: str = ""
    picture: str = ""


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a notebook: Markdown as safe HTML, or code with its outputs."""

    html: str = ""
    code: str = ""
    outputs: tuple[Output, ...] = ()


@dataclass(frozen=True, slots=True)
class Notebook:
    """The cells to show, and the number of cells left out."""

    cells: tuple[Cell, ...]
    left_out: int = 0


@lru_cache(maxsize=64)
def read_notebook(text: str) -> Notebook:
    """Parse a notebook of format 4. Raises ValueError with the end of a sentence."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("is not a notebook: it is not JSON.") from None
    found = data.get("cells") if isinstance(data, dict) else None
    if not isinstance(found, list) or data.get("nbformat") != 4:
        raise ValueError("is not a notebook of format 4. Open it in JupyterLab and save it.")
    shown = [cell for cell in found if isinstance(cell, dict)]
    room = [MOST_PICTURES]
    cells = (_cell(cell, room) for cell in shown[:MOST_CELLS])
    return Notebook(tuple(c for c in cells if c is not None), max(0, len(shown) - MOST_CELLS))


def _cell(cell: dict[str, Any], room: list[int]) -> Cell | None:
    source = _text(cell.get("source"))
    if cell.get("cell_type") == "markdown":
        return Cell(html=to_html(source, 3))
    if cell.get("cell_type") == "code":
        outputs = cell.get("outputs")
        return Cell(code=source, outputs=tuple(_outputs(outputs, room)))
    return None


def _outputs(outputs: object, room: list[int]) -> Iterable[Output]:
    for output in outputs if isinstance(outputs, list) else ():
        if not isinstance(output, dict):
            continue
        data = output.get("data")
        data = data if isinstance(data, dict) else {}
        picture = next((p for kind in _PICTURES if (p := _picture(kind, data.get(kind)))), "")
        if picture and len(picture) <= room[0]:
            room[0] -= len(picture)
            yield Output(picture=picture)
            continue
        lines = output.get("traceback") if output.get("output_type") == "error" else None
        if isinstance(lines, list):
            text = _text([f"{line}\n" for line in lines])
        else:
            text = _text(output.get("text") or data.get("text/plain"))
        if text.strip():
            yield Output(text=text)


def _picture(kind: str, value: object) -> str:
    """Return a base64 value as a ``data:`` URL; empty if it is empty or invalid."""
    try:
        data = base64.b64decode("".join(_text(value, MOST_PICTURES).split()), validate=True)
    except (binascii.Error, ValueError):
        return ""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}" if data else ""


def _text(value: object, most: int = MOST_TEXT) -> str:
    """Return a field's string or lines as text without control characters, cut to ``most``."""
    parts = value if isinstance(value, list) else [value]
    text = "".join(part for part in parts if isinstance(part, str))
    text = _CONTROL.sub("", _ESCAPES.sub("", text))
    return text if len(text) <= most else text[:most] + "\n..."


PAGE = 60

MOST_BADGES = 4
"""Maximum number of frameworks on a card."""

LONGEST = 100
"""Maximum number of characters of a search."""


@dataclass(frozen=True, slots=True)
class Card:
    """What a card shows about an environment."""

    environment: Environment
    face: Markup
    """The logo, or an icon of its kind."""
    badges: Markup
    """The frameworks, and how many devices a server may have."""
    devices: str
    """How many devices a server may have, such as ``1 to 4 GPUs``."""
    text: str
    """The summary, or the beginning of the description."""
    now: str
    """Availability, such as ``3 of 8 GPUs free now``, and the wait if there is one."""
    at_once: bool
    """True if a server would start without a wait."""
    reserved: str
    """The sentence that its GPUs are reserved for others; empty if it has GPUs for the reader."""
    price: str
    """The price of one device; empty if no device fits."""

    @property
    def slug(self) -> str:
        """The environment's slug."""
        return self.environment.slug

    @property
    def name(self) -> str:
        """The environment's display name."""
        return self.environment.display_name


@dataclass(frozen=True, slots=True)
class CardFilter:
    """The criteria of a search for environments."""

    words: str = ""
    gpu: str = ""
    """``with`` or ``without`` a GPU; empty for both."""
    framework: str = ""
    at_once: bool = False
    """Only environments that would start without a wait."""

    def __bool__(self) -> bool:
        return bool(self.words or self.gpu or self.framework or self.at_once)

    def takes(self, environment: Environment) -> bool:
        """Return True if an environment meets all criteria except ``at_once``."""
        if self.gpu and environment.cpu_only != (self.gpu == "without"):
            return False
        if self.framework and self.framework not in environment.frameworks:
            return False
        e = environment
        names = (f"{name} {version}" for name, version in e.frameworks.items())
        text = " ".join((e.slug, e.display_name, e.summary, e.description, *names)).casefold()
        return all(word in text for word in self.words.casefold().split())


def make_cards(
    environments: Sequence[Environment],
    overview: Overview,
    outlooks: Mapping[str, Outlook],
    now: datetime,
    pages_url: str,
    guaranteed: HostAmount = NOTHING,
) -> list[Card]:
    """Return a card for each environment.

    ``outlooks`` are by slug. ``pages_url`` is the URL of the catalog's pages. ``guaranteed`` is
    what a server has where its environment guarantees nothing.
    """
    prices = PriceList(overview, environments, now)
    outlooks = {
        e.slug: _of_shares(outlooks[e.slug], prices.shares_of(e))
        if e.sharing == "slot"
        else outlooks[e.slug]
        for e in environments
    }
    return [
        Card(
            environment=environment,
            face=_face(environment, pages_url),
            badges=_badges(environment, bool(prices.shares_of(environment)), guaranteed),
            devices=devices_of(environment, bool(prices.shares_of(environment))),
            text=first_words(environment.summary or environment.description),
            now=said(
                outlooks[environment.slug],
                now,
                cpu_only=environment.cpu_only,
                what="share" if environment.sharing == "slot" else "GPU",
            ),
            at_once=outlooks[environment.slug].at_once,
            reserved=outlooks[environment.slug].reserved,
            price=prices.of(environment),
        )
        for environment in environments
    ]


def usual_request(environment: Environment, guaranteed: HostAmount = NOTHING) -> Request:
    """Return the usual request in an environment, which its card describes.

    ``guaranteed`` is what a server has where the environment guarantees nothing.
    """
    usual = max(1, environment.devices.default)
    if environment.cpu_only:
        return Request(**_guaranteed(environment, guaranteed).as_fields())
    count = SHARE if environment.sharing == "slot" else usual
    return _request(environment, count, "", guaranteed=guaranteed)


def devices_of(environment: Environment, shares: bool = False) -> str:
    """Return how many devices a server of this environment may have, in words.

    ``shares``: True if it can have a share of one on this hub.
    """
    most = environment.devices.max
    if environment.sharing == "slot":
        return "a share of a GPU" if most else "no GPU"
    if not most:
        return "no GPU"
    whole = "1 GPU" if most == 1 else f"1 to {most} GPUs"
    return f"{whole} or a share of one" if shares else whole


def _of_shares(outlook: Outlook, shares: Iterable[ShareCount]) -> Outlook:
    """Return the outlook with the numbers of shares in place of those of devices."""
    some = list(shares)
    return replace(
        outlook, free=sum(each.free for each in some), total=sum(each.total for each in some)
    )


def said(outlook: Outlook, now: datetime, *, cpu_only: bool = False, what: str = "GPU") -> str:
    """Return the availability: ``0 of 8 GPUs free now, start by 15:17 UTC at the latest``."""
    if cpu_only:
        return f"Waits for {outlook.lacking}" if outlook.lacking else "Available now"
    if not outlook.total:
        return outlook.reserved or "No suitable GPU in service"
    plural = "" if outlook.total == 1 else "s"
    free, total = map(format_devices, (outlook.free, outlook.total))
    free = f"{free} of {total} {what}{plural} free now"
    if outlook.lacking:
        return f"{free}, waits for {outlook.lacking}"
    if start := "" if outlook.at_once else outlook.start(now):
        return f"{free}, start {start}"
    return f"{free}, others wait" if outlook.ahead and not outlook.at_once else free


def frameworks_of(environments: Sequence[Environment]) -> list[str]:
    """Return the names of all frameworks in these environments, sorted."""
    return sorted({name for e in environments for name in e.frameworks}, key=str.casefold)


# Icons of environments without a logo, drawn in lines on 24 by 24.

ICONS = {
    "flame": Markup(
        '<path d="M12 3c1 4 6 6 6 11a6 6 0 0 1-12 0c0-3 2-4 2-7 2 1 3 2 3 4 1-2 2-5 1-8z"/>'
    ),
    "graph": Markup(
        '<path d="M7.5 7.5l3.5 8M16.5 8L13 15.5M8.5 6h7"/><circle cx="6" cy="6" r="2.5"/>'
        '<circle cx="18" cy="6" r="2.5"/><circle cx="12" cy="18" r="2.5"/>'
    ),
    "terminal": Markup(
        '<rect x="3" y="4" width="18" height="16" rx="2"/><path d="M7 9l3 3-3 3M12 15h5"/>'
    ),
    "chip": Markup(
        '<rect x="7" y="7" width="10" height="10" rx="1"/>'
        '<path d="M10 3v4M14 3v4M10 17v4M14 17v4M3 10h4M3 14h4M17 10h4M17 14h4"/>'
    ),
    "notebook": Markup(
        '<rect x="5" y="3" width="14" height="18" rx="2"/><path d="M9 3v18M12 8h4M12 12h4"/>'
    ),
}

_WORDS = {
    "flame": {"pytorch", "torch"},
    "graph": {"jax", "tensorflow", "keras", "rapids", "cudf", "numba", "julia"},
    "terminal": {"vscode", "code", "terminal", "shell", "ssh"},
}


def icon_of(environment: Environment) -> str:
    """Return which of :data:`ICONS` an environment has without a logo."""
    e = environment
    names = " ".join((e.slug, e.display_name, *e.frameworks, e.default_url))
    found = set(re.findall(r"[a-z]+", names.lower()))
    kinds = (kind for kind, words in _WORDS.items() if words & found)
    return next(kinds, "notebook" if e.cpu_only else "chip")


# Cached, because these parts are the same for every reader.


@lru_cache(maxsize=1024)
def _face(environment: Environment, pages_url: str) -> Markup:
    if environment.logo:
        beside = not environment.logo.startswith("/")
        source = f"{pages_url}/{environment.slug}/logo" if beside else environment.logo
        logo = Markup(
            '<img class="gs-logo" src="{}" alt="" width="40" height="40" loading="lazy">'
        ).format(source)
    else:
        logo = Markup(
            '<span class="gs-logo" aria-hidden="true"><svg viewBox="0 0 24 24">{}</svg></span>'
        ).format(ICONS[icon_of(environment)])
    return Markup('<span class="gs-face">{}</span>').format(logo)


@lru_cache(maxsize=1024)
def _badges(environment: Environment, shares: bool, guaranteed: HostAmount) -> Markup:
    of_one = Markup('<span class="badge text-bg-light border">{} {}</span>')
    shown = islice(environment.frameworks.items(), MOST_BADGES)
    found = [of_one.format(name, version) for name, version in shown]
    devices = Markup('<span class="badge text-bg-secondary">{}</span>')
    found.append(devices.format(devices_of(environment, shares)))
    if kept := _guaranteed(environment, guaranteed):
        found.append(devices.format(f"{kept} guaranteed"))
    return Markup(" ").join(found)


T = TypeVar("T")

MOST_PACKAGES = 1000

_PACKAGE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^\]]*\])?\s*==\s*([^\s;\\]+)")


@dataclass(frozen=True, slots=True)
class Details:
    """The contents of an environment's page. Missing or unreadable parts are empty."""

    description: str
    """Safe HTML."""
    packages: tuple[tuple[str, str], ...]
    """Pairs of name and version."""
    packages_left_out: int
    changes: str
    """Safe HTML."""
    notebook: Notebook | None
    limits: Mapping[str, str]
    """What a server has or needs, formatted; empty texts for what is not limited."""
    data: tuple[str, ...]
    """Names of the datasets and shared folders of its servers."""
    troubles: tuple[str, ...]
    """Sentences for an admin about files that cannot be read."""


def read_details(
    catalog: Catalog,
    environment: Environment,
    groups: Collection[str],
    usual: Mapping[str, object] | None = None,
    guaranteed: HostAmount = NOTHING,
) -> Details:
    """Return the details of an environment for a reader in these groups. Reads files.

    ``usual`` are the hub's own ``mem_limit`` and ``cpu_limit``, for an environment without one;
    ``guaranteed`` is what a server has where its environment guarantees nothing.
    """
    troubles: list[str] = []

    def read(key: str, make: Callable[[str], T], otherwise: T) -> T:
        name = getattr(environment, key)
        if not name or catalog.folder is None:
            return otherwise
        try:
            return make(parser.read_text(catalog.folder, key, name))
        except ValueError as error:
            troubles.append(f"'{key}' of the environment {environment.slug!r} {error}")
            return otherwise

    packages: list[tuple[str, str]] = read("packages", read_packages, [])
    return Details(
        description=to_html(environment.description, 3),
        packages=tuple(packages[:MOST_PACKAGES]),
        packages_left_out=max(0, len(packages) - MOST_PACKAGES),
        changes=read("changes", lambda text: to_html(text, 3), ""),
        notebook=read("sample_notebook", read_notebook, None),
        limits=_limits(environment, usual or {}, _guaranteed(environment, guaranteed)),
        data=tuple(mount.name for mount in catalog.mounts_for(environment, groups)),
        troubles=tuple(troubles),
    )


def read_packages(text: str) -> list[tuple[str, str]]:
    """Return the sorted names and versions from the output of ``pip freeze`` or a lock file."""
    found = (_PACKAGE.match(line.strip()) for line in text.splitlines())
    return sorted({(m[1], m[2]) for m in found if m}, key=lambda p: (p[0].casefold(), p[1]))


def logo_file(catalog: Catalog, environment: Environment) -> tuple[bytes, str]:
    """Return the logo beside the catalog and its media type. Raises ValueError without one."""
    if not environment.logo or environment.logo.startswith("/") or catalog.folder is None:
        raise ValueError("has no logo beside the catalog.")
    content = parser.read(catalog.folder, "logo", environment.logo)
    return content, LOGO_TYPES[Path(environment.logo).suffix.lower()]


def _limits(
    environment: Environment, usual: Mapping[str, object], kept: HostAmount
) -> dict[str, str]:
    e, hours = environment, environment.hours.max
    memory, cores = e.mem_limit or usual.get("mem_limit"), e.cpu_limit or usual.get("cpu_limit")
    return {
        "cores_guaranteed": format_cores(kept.milli_cpus) if kept.milli_cpus else "",
        "memory_guaranteed": format_bytes(kept.memory_bytes) if kept.memory_bytes else "",
        "gpu_memory": format_memory(e.min_memory) if e.min_memory else "",
        "session": format_time_left(timedelta(hours=hours)) if hours else "",
        "cores": f"{cores:g}" if isinstance(cores, (int, float)) else "",
        "memory": format_memory(memory) if isinstance(memory, int) else str(memory or ""),
        "shared_memory": format_memory(e.shm_size) if e.shm_size else "",
    }


Ask = Callable[[Mapping[str, Request]], Mapping[str, Outlook]]


def wait_tables(
    environments: Sequence[Environment],
    counts: Sequence[int | str],
    models: Sequence[str],
    ask: Ask,
    now: datetime,
    by_memory: Mapping[str, Sequence[MemoryChoice]] | None = None,
    guaranteed: HostAmount = NOTHING,
) -> Tables[str]:
    """Return a sentence on the wait for each choice of the form.

    ``ask`` returns how requests would fare, as
    :meth:`gpuspawner.queue.positions.PositionService.outlooks` does. With ``by_memory``, the
    answer is about these choices in place of the ``counts`` and ``models``, by slug.
    ``guaranteed`` is what a server has where its environment guarantees nothing.
    """
    alike = group_alike(
        (e for e in environments if not e.cpu_only),
        lambda e: (e.devices, e.models, e.min_memory, e.sharing, _guaranteed(e, guaranteed)),
    )
    choices = [
        list(product(counts, ["", *models], [0])) if by_memory is None else by_memory[some[0].slug]
        for some in alike
    ]
    if sum(map(len, choices)) > MOST_CHOICES:
        return Tables({}, ())
    requests = {
        f"{at}|{choice_key(*choice)}": _request(some[0], *choice, guaranteed=guaranteed)
        for at, some in enumerate(alike)
        for choice in choices[at]
    }
    outlooks = ask({name: request for name, request in requests.items() if request.devices})
    tables: list[dict[str, str]] = [{} for _ in alike]
    for name, outlook in outlooks.items():
        at, _, choice = name.partition("|")
        tables[int(at)][choice] = sentence(outlook, now)
    return Tables.shared(alike, tables)


def sentence(outlook: Outlook, now: datetime) -> str:
    """Return a sentence on the wait for one choice; empty if no device of the hub fits."""
    if outlook.at_once:
        return "Starts now."
    if not outlook.total:
        return ""
    if outlook.lacking:
        return f"You would wait in the queue for {outlook.lacking}."
    if start := outlook.start(now):
        return f"Not enough are free now. Expected start: {start}."
    return "Not enough are free now. You would wait in the queue."


def _request(
    environment: Environment,
    count: int | str,
    model: str,
    memory: int = 0,
    *,
    guaranteed: HostAmount,
) -> Request:
    """Return the request of a choice of the form; one without devices if nobody can have it."""
    is_share = isinstance(count, str)
    devices = 1 if isinstance(count, str) else count
    can_have = environment.has_slots if is_share else environment.has_whole_devices
    if not can_have or not 0 < devices <= environment.devices.max:
        return Request()
    return Request(
        devices=devices,
        sharing=Sharing.SLOT if is_share else Sharing.WHOLE,
        model=model or None,
        models=environment.models,
        memory_bytes=max(environment.min_memory, memory * 10**9),
        smallest=memory > 0,
        **_guaranteed(environment, guaranteed).as_fields(),
    )


def _guaranteed(environment: Environment, usual: HostAmount) -> HostAmount:
    """Return what a server is guaranteed with the usual options of an environment.

    ``usual`` is for an environment that guarantees nothing itself.
    """
    return guaranteed_to(environment.with_options({}), usual)
