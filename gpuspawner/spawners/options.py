"""The options of a spawn, from the form, a link or the REST API's ``user_options``. Pure.

JupyterHub stores them and returns them at the next start, so every start validates them as
untrusted text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from datetime import datetime, timezone
from functools import partial
from typing import Any
from urllib.parse import urlencode

from ..catalog.loader import Catalog
from ..catalog.models import Environment, SessionHours
from ..catalog.value_kinds import MOST_HOURS
from ..core.errors import ConfigError, InvalidRequest, TooMuchAsked
from ..leases.host_resources import NOTHING, HostAmount, guaranteed_to
from ..leases.models import SHARE, Request, Sharing
from ..ledger.rules import parse_account

MOST_DATA = 200
LONGEST_DATA = 128


@dataclass(frozen=True, slots=True)
class DataChoice:
    """One entry in the form's list of datasets and shared folders."""

    name: str
    where: str
    """The slugs of the environments that have it, separated by spaces."""
    checked: bool


def parse_data(value: Any) -> tuple[str, ...] | None:
    """Parse the names of datasets and folders; None if not given. Raises InvalidRequest."""
    said = [value] if isinstance(value, str) else value
    if said is None:
        return None
    if not isinstance(said, (list, tuple)) or len(said) > MOST_DATA:
        raise InvalidRequest("The field 'data' must be a list of names.", field="data")
    for name in said:
        if not isinstance(name, str) or len(name) > LONGEST_DATA or not name.isprintable():
            shown = repr(str(name)[:60]) if isinstance(name, str) else "something else"
            raise InvalidRequest(f"The field 'data' must hold names, not {shown}.", field="data")
    return tuple(dict.fromkeys(name for name in said if name))  # a form sends "" for none


def with_data(
    catalog: Catalog,
    environment: Environment,
    chosen: Sequence[str] | None,
    groups: Collection[str],
) -> Environment:
    """Return the environment with only the chosen datasets and folders; with all if None.

    A form also sends the names of other environments', which are ignored. Raises InvalidRequest
    for a name that the member has in no environment.
    """
    if chosen is None:
        return environment
    mounts = (*catalog.datasets, *catalog.shared_folders)
    known = {mount.name for mount in mounts if mount.visible_to(groups)}
    for name in chosen:
        if name not in known:
            yours = f"You have: {', '.join(sorted(known))}." if known else "You have none."
            raise InvalidRequest(
                f"You have no dataset or shared folder {name[:60]!r}. {yours}", field="data"
            )
    here = {mount.name for mount in catalog.mounts_for(environment, groups)} & set(chosen)
    return environment.model_copy(
        update={
            "datasets": tuple(m.name for m in catalog.datasets if m.name in here),
            "shared_folders": tuple(m.name for m in catalog.shared_folders if m.name in here),
        }
    )


def data_choices(
    catalog: Catalog,
    environments: Sequence[Environment],
    groups: Collection[str],
    last: Sequence[str] | None,
) -> list[DataChoice]:
    """Return the datasets and folders that the form offers, in the catalog's order."""
    found: dict[str, list[str]] = {}
    for environment in environments:
        for mount in catalog.mounts_for(environment, groups):
            found.setdefault(mount.name, []).append(environment.slug)
    return [
        DataChoice(name, " ".join(slugs), last is None or name in last)
        for name, slugs in found.items()
    ]


IGNORED = ("_xsrf",)
INSTEAD = "gpuspawner_instead"
"""The name of the buttons above a refused form; see :meth:`FormChoice.instead`."""
MOST_GPUS = 1024
LONGEST_OPTION = 128
LEAST_HOURS = 0.25
MOST_OPTIONS = 2000

_HOURS = re.compile(r"[0-9]{1,9}(?:\.[0-9]{0,20})?|\.[0-9]{1,20}")
_OPTION = re.compile(r"(?:[a-z0-9-]+\.)?[A-Za-z0-9_-]+=[A-Za-z0-9_-]+")
_YES = ("yes", "true", "on", "1")
_NO = ("no", "false", "off", "0")


@dataclass(frozen=True, slots=True)
class FormChoice:
    """The parsed fields. None means not given."""

    environment: str | None = None
    """The name of an environment in the catalog. Without it: the catalog's default."""
    gpus: int | str | None = None
    """Number of devices; 0 is a server without one, and :data:`SHARE` a share of one."""
    gpu_model: str | None = None
    """Words of a model's name, such as ``A100``."""
    gpu_memory: int | None = None
    """The least memory of each device, or of the share, in whole GB (10^9 bytes, as advertised).
    The server gets the smallest that fits and is free."""
    hours: float | None = None
    """Session length in hours."""
    wait: bool | None = None
    """False to be refused, and not to wait in the queue, if no device is free."""
    account: str | None = None
    """Who pays: ``member:NAME``, the member's own, or ``group:NAME`` of a group of theirs."""
    options: tuple[str, ...] | None = None
    """Choices within an environment, each ``OPTION=CHOICE``. A form without scripts sends
    ``ENVIRONMENT.OPTION=CHOICE`` for all of its environments."""
    data: tuple[str, ...] | None = None
    """Names of the datasets and shared folders for the server. Without it: all that it may have."""
    own_image: str | None = None
    """The reference of an image that replaces the environment's."""
    shown_at: str | None = None
    """When the form showed its prices, as ISO 8601 with an offset."""

    def as_user_options(self) -> dict[str, Any]:
        """Return what JupyterHub stores: only the fields that were given."""
        said = {name: getattr(self, name) for name in FIELDS}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in said.items()
            if value is not None
        }

    def as_query(self) -> str:
        """Return the query of a link that opens the form with these choices."""
        said = {f"opt-{name}": value for name, value in self.as_user_options().items()}
        said.pop("opt-shown_at", None)
        return urlencode(said, doseq=True)

    def instead(self, way: str) -> FormChoice:
        """Return what to ask for after a refusal: ``queue`` to wait, ``cpu`` without a GPU.

        Raises InvalidRequest for any other way; an empty one changes nothing.
        """
        match way:
            case "":
                return self
            case "queue":
                return replace(self, wait=True)
            case "cpu":
                return replace(self, gpus=0, gpu_model=None, gpu_memory=None, wait=None)
        raise InvalidRequest(field=INSTEAD)

    def options_in(self, environment: Environment) -> dict[str, str]:
        """Return the choices for this environment, by option."""
        found = {}
        for said in self.options or ():
            name, _, choice = said.partition("=")
            where, dot, option = name.rpartition(".")
            if not dot or where == environment.slug:
                found[option] = choice
        return found


FIELDS = tuple(field.name for field in dataclass_fields(FormChoice))
"""Field names in the form, in links and in ``user_options``."""


def parse(
    fields: Mapping[str, Any], *, foreign: bool = False, extra: Collection[str] = ()
) -> FormChoice:
    """Parse and validate the member's choice.

    A field may be a value or, as in a form, a list of one. ``foreign`` permits all fields that are
    not ours, for an admin's own form; ``extra`` permits those with these names. Raises
    InvalidRequest naming the field, or TooMuchAsked.
    """
    if not isinstance(fields, Mapping):
        raise InvalidRequest("The options must be fields with values.", field="user_options")
    if not fields:
        return FormChoice()
    if not foreign:
        unknown = [str(n) for n in fields if n not in FIELDS + IGNORED and n not in extra]
        if unknown:
            known = ", ".join((*FIELDS, *extra))
            raise InvalidRequest(
                f"There is no field {unknown[0][:60]!r}. The fields are {known}. "
                "An admin of this hub can allow others.",
                field=unknown[0],
            )
    given = {
        name: parser(name, value)
        for name, parser in _PARSERS.items()
        if (value := _single(fields, name)) is not None
    }
    said = _options(fields.get("options"))
    given["options"] = _options_without_prefix(given.get("environment"), said)
    return FormChoice(**given, data=parse_data(fields.get("data")))


def choose_environment(
    catalog: Catalog, choice: FormChoice, groups: Collection[str]
) -> Environment:
    """Return the chosen environment, or the usual one, with the chosen options and data.

    Raises Refused for a choice that a member of these groups does not have.
    """
    if choice.environment:
        environment = catalog.get_for(choice.environment, groups)
    else:
        environment = catalog.default_for(groups)
    environment = environment.with_options(choice.options_in(environment))
    return with_data(catalog, environment, choice.data, groups)


def resolve(
    choice: FormChoice, environment: Environment, limit: int, usual: HostAmount = NOTHING
) -> Request:
    """Return the request that results from the choice in this environment.

    ``limit`` is the most devices that one server of this member may have; ``usual`` is guaranteed
    where the environment guarantees nothing. Raises TooMuchAsked.
    """
    host = guaranteed_to(environment, usual).as_fields()
    most = min(limit, environment.devices.max)
    asked = choice.gpus
    if asked is None:
        asked = usual_gpus(environment, limit)
    elif asked not in (SHARE, 0) and environment.sharing == "slot":
        raise InvalidRequest(
            f"{environment.display_name} runs on a share of a GPU, not on whole ones. Ask for a "
            f"share{', or for 0' if environment.cpu_variant else ''}.",
            field="gpus",
        )
    if isinstance(asked, str):
        _require_share(environment, most)
    count = 1 if isinstance(asked, str) else asked
    if count > most:
        raise TooMuchAsked(_too_many(count, most, environment, limit))
    if not count and not environment.cpu_variant:
        raise TooMuchAsked(
            f"{environment.display_name} does not run without a GPU. "
            + ("Ask for 1 or more." if most else "Choose another: you may have no GPU here."),
            field="gpus",
        )
    if not count:
        return Request(environment=environment.slug, **host)
    return Request(
        devices=count,
        environment=environment.slug,
        model=choice.gpu_model,
        models=environment.models,
        memory_bytes=max((choice.gpu_memory or 0) * 10**9, environment.min_memory),
        smallest=choice.gpu_memory is not None,
        min_driver=environment.min_driver,
        min_cuda=environment.min_cuda,
        sharing=Sharing.SLOT if asked == SHARE else Sharing.WHOLE,
        **host,
    )


def usual_gpus(environment: Environment, limit: int) -> int | str:
    """Return what a server gets if its member says nothing: a number of devices, or a share.

    ``limit`` is the most devices that one server of this member may have.
    """
    count = min(environment.devices.default, environment.devices.max, limit)
    return SHARE if count and environment.sharing == "slot" else count


def _require_share(environment: Environment, most: int) -> None:
    """Raise a refusal if a server of this environment gets no share of a device."""
    name = environment.display_name
    if not environment.devices.max:
        raise TooMuchAsked(
            f"You asked for a share of a GPU, but {name} runs without one. Ask for 0.", field="gpus"
        )
    if not environment.has_slots:
        raise InvalidRequest(
            f"{name} needs whole GPUs, not a share of one. Ask for 1 or more.", field="gpus"
        )
    if not most:
        raise TooMuchAsked(
            "You asked for a share of a GPU; your limit is 0 for one server. Ask for 0.",
            field="gpus",
        )


def combine(own: SessionHours, general: SessionHours) -> SessionHours:
    """Combine an environment's session hours with the hub's for this member.

    The lower maximum wins. The environment's default wins, but never exceeds the maximum.
    """
    most = min((m for m in (own.max, general.max) if m is not None), default=None)
    usual = own.default if own.default is not None else general.default
    if most is None or usual is None:
        return SessionHours(default=most if usual is None else usual, max=most)
    return SessionHours(default=min(usual, most), max=most)


def hours_setting(name: str, hours: Any) -> float | None:
    """Return a setting's number of hours; None for no limit. Raises ConfigError."""
    if hours is None:
        return None
    number = isinstance(hours, (int, float)) and not isinstance(hours, bool)
    if not number or not 0 < hours <= MOST_HOURS:
        given = f"c.GPUSpawnerMixin.{name} is {hours!r}; it is a number of hours, or None."
        raise ConfigError(what=f"{given} {MOST_HOURS} is the most")
    return float(hours)


def session_seconds(
    choice: FormChoice, hours: SessionHours, environment: Environment
) -> int | None:
    """Return the session length in seconds that results from the choice; None for no end.

    ``hours`` applies to this member in this environment. Raises TooMuchAsked.
    """
    asked = hours.default if choice.hours is None else choice.hours
    if asked is None:
        return None
    if hours.max is not None and asked > hours.max:
        whose = environment.display_name
        allows = f"{whose} allows" if environment.hours.max == hours.max else "your limit is"
        raise TooMuchAsked(
            f"The field 'hours' asks for {asked:g} hours; {allows} {hours.max:g} for one session. "
            f"Write {hours.max:g} or less.",
            field="hours",
        )
    return max(1, round(3600 * asked))


def _too_many(count: int, most: int, environment: Environment, limit: int) -> str:
    asked = f"You asked for {count} GPU{'s' if count > 1 else ''}"
    if most == 0 and limit > 0:
        return f"{asked}, but {environment.display_name} runs without one. Ask for 0."
    advice = f"Ask for {most} or fewer." if most else "Ask for 0."
    if limit < environment.devices.max:
        return f"{asked}; your limit is {limit} for one server. {advice}"
    return f"{asked}; {environment.display_name} allows {most}. {advice}"


# The parsers of single fields. Each returns None for a blank text, and raises InvalidRequest.


def _single(fields: Mapping[str, Any], name: str) -> Any:
    value = fields.get(name)
    if isinstance(value, (list, tuple)):
        if len(value) > 1:
            raise InvalidRequest(f"The field {name!r} was given more than once.", field=name)
        value = value[0] if value else None
    return None if value == "" else value


def _text(name: str, value: Any, longest: int = LONGEST_OPTION) -> str | None:
    if not isinstance(value, str) or len(value) > longest or not value.isprintable():
        raise _invalid(name, "a short text", value)
    return value.strip() or None


def _whole(name: str, value: Any) -> int:
    text = _digits(value, int, str)
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise _invalid(name, "a whole number from 0", value)
    if name == "gpus" and int(text) > MOST_GPUS:
        raise TooMuchAsked(f"You asked for {int(text)} GPUs, more than any server can have.")
    return int(text)


def _gpus(name: str, value: Any) -> int | str:
    if value == SHARE:
        return SHARE
    try:
        return _whole(name, value)
    except InvalidRequest:
        raise _invalid(name, f"a whole number from 0, or {SHARE!r}", value) from None


def _gigabytes(name: str, value: Any) -> int:
    text = _digits(value, int, str)
    if not (text.isascii() and text.isdigit() and 0 < int(text[:10]) < 10**9):
        raise _invalid(name, "a whole number of GB from 1, such as 10", value)
    return int(text)


def devices_in(gpus: Any) -> int:
    """Return how many devices the stored value of ``gpus`` is at most; 1 for a share or none."""
    return 1 if gpus == SHARE else int(gpus or 1)


def _hours(name: str, value: Any) -> float:
    text = _digits(value, int, float, str)
    hours = float(text) if _HOURS.fullmatch(text) else 0.0
    if not LEAST_HOURS <= hours <= MOST_HOURS:
        what = f"a number of hours from {LEAST_HOURS:g} to {MOST_HOURS}, such as 1.5"
        raise _invalid(name, what, value)
    return hours


def _yes_or_no(name: str, value: Any) -> bool:
    word = str(value).strip().lower() if isinstance(value, (bool, str)) else ""
    if word not in _YES + _NO:
        raise _invalid(name, "yes or no", value)
    return word in _YES


def _moment(name: str, value: Any) -> str | None:
    text = _text(name, value)
    if text is None:
        return None
    with suppress(ValueError, OverflowError):
        moment = datetime.fromisoformat(text)
        if moment.tzinfo:
            return moment.astimezone(timezone.utc).isoformat()
    raise _invalid(name, "a time such as '2026-10-01T08:00:00+00:00'", text)


_PARSERS: Mapping[str, Callable[[str, Any], Any]] = {
    "environment": _text,
    "gpus": _gpus,
    "gpu_model": _text,
    "gpu_memory": _gigabytes,
    "hours": _hours,
    "wait": _yes_or_no,
    "account": lambda name, value: parse_account(value),
    "own_image": partial(_text, longest=255),
    "shown_at": _moment,
}


def _options(value: Any) -> tuple[str, ...] | None:
    """Parse a list of texts such as ``memory=large``, or a mapping such as ``{memory: large}``."""
    if isinstance(value, Mapping):
        value = [f"{option}={c if isinstance(c, str) else '?'}" for option, c in value.items()]
    said = [value] if isinstance(value, str) else value
    if said is None:
        return None
    if not isinstance(said, (list, tuple)) or len(said) > MOST_OPTIONS:
        raise InvalidRequest("The field 'options' must be a list of choices.", field="options")
    said = [each for each in said if each != ""]  # an empty entry of a form means the default
    for each in said:
        fits = isinstance(each, str) and len(each) <= 2 * LONGEST_OPTION
        if not fits or not _OPTION.fullmatch(each):
            raise InvalidRequest(
                f"The field 'options' must hold texts such as 'memory=large', not {_said(each)}.",
                field="options",
            )
    return tuple(said) or None


def _options_without_prefix(
    environment: str | None, said: tuple[str, ...] | None
) -> tuple[str, ...] | None:
    """Return the options for this environment, without its name in front."""
    if not environment or not said:
        return said
    ours = [each for each in said if "." not in each or each.startswith(f"{environment}.")]
    return tuple(each.rpartition(".")[2] for each in ours) or None


def _digits(value: Any, *kinds: type) -> str:
    """Return a value of one of these types as text; empty for all others and for booleans."""
    right = isinstance(value, kinds) and not isinstance(value, bool) and not _is_huge(value)
    return str(value).strip() if right else ""


def _invalid(name: str, what: str, value: Any) -> InvalidRequest:
    return InvalidRequest(f"The field {name!r} must be {what}, not {_said(value)}.", field=name)


def _said(value: Any) -> str:
    return "a huge number" if _is_huge(value) else repr(str(value)[:60])


def _is_huge(value: Any) -> bool:
    """Return True for an integer that may have too many digits for Python to format."""
    return isinstance(value, int) and abs(value) > 10**40
