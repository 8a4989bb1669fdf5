"""The texts of the files that an installation writes, and of the same files in hub_config."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any

import jinja2

from .models import (
    BIN_FOLDER,
    CATALOG,
    CLIENT_SECRET,
    COMMAND,
    CONFIG,
    CONFIG_FOLDER,
    ENVIRONMENT,
    HUB_UNIT,
    MIG_UNIT,
    NGINX,
    PRIVATE,
    PROGRAM,
    PROXY_UNIT,
    SUBNET,
    UNIT_FOLDER,
    Answers,
    TargetFile,
)
from .rules import gateway_of, merge_variables, words
from .sign_in import EXAMPLE_DOMAIN, SIGN_INS

ENVIRONMENT_HEADER = """\
# Variables of the hub and of its proxy. `gpuspawner init` wrote them; add your own, it keeps them.
# After a change, type: systemctl restart gpuspawner
"""


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(  # nosec B701 - no HTML
        loader=jinja2.PackageLoader("gpuspawner.install"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals["tljh"] = ""  # TLJH's folder, in the files for it
    environment.filters["shell"] = shlex.quote
    environment.filters["text"] = _python_text
    environment.filters["texts"] = _python_set
    return environment


def _python_text(value: str) -> str:
    """Return a text as a Python literal."""
    return json.dumps(value, ensure_ascii=False)


def _python_set(value: str | Iterable[str]) -> str:
    """Return a Python literal of a set of texts, from several texts or one list with commas."""
    parts = words(value) if isinstance(value, str) else tuple(value)
    return "{" + ", ".join(map(_python_text, parts)) + "}" if parts else "set()"


def _render(template: str, values: Mapping[str, Any]) -> str:
    return _environment().get_template(f"{template}.j2").render(values)


def _values(answers: Answers, bin_folder: str, **more: str | bool) -> dict[str, Any]:
    return {
        "example": False,
        "auth": answers.auth,
        "domain": answers.domain or EXAMPLE_DOMAIN,
        "admins": answers.admins,
        "gateway": gateway_of(answers.subnet),
        "bin": bin_folder,
        "proxy": f"{bin_folder}/configurable-http-proxy",
        "node_path": "",
        **answers.settings,
        **more,
    }


def configuration_files(
    answers: Answers, *, bin_folder: str, proxy: str, node_path: str
) -> list[TargetFile]:
    """Return the files without secrets, except the catalog.

    Args:
        answers: What the admin chose.
        bin_folder: The folder of the ``jupyterhub`` command.
        proxy: The path of the proxy's program.
        node_path: The folder of Node.js, if it is not where systemd looks.
    """
    values = _values(answers, bin_folder, proxy=proxy, node_path=node_path)
    files = [TargetFile(CONFIG, _render("jupyterhub_config.py", values))]
    if SIGN_INS[answers.auth].in_file:
        name = f"auth/{answers.auth}.py"
        files.append(TargetFile(f"{CONFIG_FOLDER}/{name}", _render(name, values)))
    if answers.domain:
        files.append(TargetFile(NGINX, _render("nginx.conf", values)))
    for name in (PROXY_UNIT, MIG_UNIT, HUB_UNIT):
        files.append(TargetFile(f"{UNIT_FOLDER}/{name}", _render(name, values)))
    if bin_folder != str(PurePosixPath(COMMAND).parent):  # there is gpuspawner itself
        files.append(TargetFile(COMMAND, _render("gpuspawner.sh", values), PROGRAM))
    return files


def catalog_file(text: str | None = None) -> TargetFile:
    """Return the catalog: a site's own, or the one of hub_config."""
    return TargetFile(CATALOG, _render("catalog.yaml", {}) if text is None else text)


def tljh_files(prefix: str, bin_folder: str, config: str) -> tuple[list[TargetFile], ...]:
    """Return the files for TLJH: those that an admin edits, and all others.

    Args:
        prefix: TLJH's folder.
        bin_folder: The folder of its ``jupyterhub`` command.
        config: The configuration file that its hub reads.
    """
    values = {"tljh": prefix, "config": config, "gateway": gateway_of(SUBNET), "bin": bin_folder}
    folder = f"{prefix}/config/jupyterhub_config.d"
    edited = [
        TargetFile(f"{folder}/gpuspawner.py", _render("tljh_config.py", values)),
        TargetFile(f"{folder}/catalog.yaml", catalog_file().text),
    ]
    drop_in = f"{UNIT_FOLDER}/jupyterhub.service.d/gpuspawner.conf"
    others = [
        TargetFile(drop_in, _render("tljh_unit.conf", values)),
        TargetFile(f"{UNIT_FOLDER}/{MIG_UNIT}", _render(MIG_UNIT, values)),
        TargetFile(COMMAND, _render("gpuspawner.sh", values), PROGRAM),
    ]
    return edited, others


def secret_files(
    variables: Mapping[str, str], without: Iterable[str], before: str | None
) -> list[TargetFile]:
    """Return the files of mode 600: the variables, and the client secret if it has its own file.

    Args:
        variables: The hub's variables, with their secrets.
        without: Variables that the file must not have.
        before: The file of variables that is there.
    """
    own = dict(variables)
    files = []
    if (secret := own.pop(CLIENT_SECRET, None)) is not None:
        files.append(
            TargetFile(CLIENT_SECRET, f"{secret}\n", PRIVATE, is_secret=True, keeps_edits=True)
        )
    text = merge_variables(ENVIRONMENT_HEADER if before is None else before, own, tuple(without))
    files.append(
        TargetFile(ENVIRONMENT, text, PRIVATE, is_secret=True, has_variables=True, keeps_edits=True)
    )
    return files


def example_files() -> dict[str, str]:
    """Return the files of hub_config that these templates make, by their names there."""
    oauth = {each.name: each.example for each in SIGN_INS["oauth"].questions}
    answers = Answers("oauth", "gpu.example.org", settings=oauth, subnet=SUBNET)
    values = _values(answers, BIN_FOLDER, example=True)
    units = (HUB_UNIT, MIG_UNIT, PROXY_UNIT)
    names = ("jupyterhub_config.py", *units, "nginx.conf", "catalog.yaml")
    found = {name: _render(name, values) for name in names}
    for sign_in in SIGN_INS.values():
        if sign_in.in_file:
            settings = {each.name: each.example for each in sign_in.questions}
            answers = Answers(sign_in.name, EXAMPLE_DOMAIN, ("grace",), settings)
            name = f"auth/{sign_in.name}.py"
            found[name] = _render(name, _values(answers, BIN_FOLDER, example=True))
    return found
