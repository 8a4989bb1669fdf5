"""The commands ``gpuspawner init``, ``upgrade`` and ``uninstall``."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from ..catalog.loader import Catalog
from ..cli.check import line_of
from ..cli.command import Command, Invocation, wants_json
from ..cli.config import Settings
from ..cli.output import note, show
from ..cli.parameters import PATH, Parsed, flag, option, yes_option
from ..core.errors import ConfigError, Refused
from ..engines.preflight import CheckFinding, Status
from . import rules
from .files import FileTree
from .host import Host, LocalHost, OfflineHost, run_apart
from .interview import Interview, Options, parse_open_database
from .models import (
    CATALOG,
    CONFIG,
    CONFIG_FOLDER,
    DATABASE_VARIABLE,
    ENVIRONMENT,
    HUB_UNIT,
    JUPYTERHUB_DATABASE,
    NGINX,
    RECORD,
    STATE_FOLDER,
    SUBNET,
    FileChange,
)
from .service import Choices, Installer, Plan, Uninstaller, run_as_hub
from .sign_in import DEFAULT, SIGN_INS
from .upgrade import Upgrader

RUN_GPUSPAWNER = (
    "import sys; sys.path = [each for each in sys.path if each]; "
    "from gpuspawner.cli.app import main; sys.exit(main())"
)
"""Like ``python -m gpuspawner``, but ignores the working directory, where others may write."""

prefix_option = option(
    "--prefix",
    "DIR",
    "the root folder of an image: no programs are run there",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    default=Path("/"),
)


@click.command()
@flag("--defaults", "ask nothing, and use the default for what is not given")
@option(
    "--domain",
    "NAME",
    "the hub's domain name, such as gpu.example.org",
    type=Parsed("domain", rules.parse_domain),
)
@option(
    "--auth",
    "NAME",
    f"who signs in: {', '.join(SIGN_INS)} (default: {DEFAULT})",
    type=click.Choice(list(SIGN_INS)),
)
@option(
    "--set",
    "NAME=VALUE",
    "a setting of the sign-in, such as allowed=lab:gpu; secrets come from the environment",
    "settings",
    type=Parsed("setting", rules.parse_setting),
    multiple=True,
)
@option(
    "--admin",
    "NAME",
    "the user name of an admin; can be given several times",
    "admins",
    type=Parsed("admin", rules.parse_admin),
    multiple=True,
)
@option(
    "--database",
    "URL",
    "sqlite (the default), or a PostgreSQL URL without a password",
    type=Parsed("database", parse_open_database),
)
@option("--catalog", "FILE", "a catalog of your own (default: PyTorch and JupyterLab)", type=PATH)
@option(
    "--subnet",
    "NETWORK",
    f"addresses of members' servers (default: {SUBNET})",
    type=Parsed("subnet", rules.parse_subnet),
)
@prefix_option
@flag("--diff", "show what would change, and change nothing")
@flag("--force", "replace edited files too; each is kept under another name")
def init(prefix: Path, defaults: bool, diff: bool, force: bool, **given: Any) -> int:
    """Install or change a hub. Returns the exit code of ``gpuspawner check``."""
    host = open_host(prefix)
    _require_root(host)
    installer = Installer(FileTree(prefix), host)
    asks = is_terminal() and not defaults
    choices = _choices(installer, given, force=force, asks=asks)
    plan = installer.plan(choices)
    if diff:
        for change in plan.changes:
            click.echo(rules.diff_of(change), nl=False)
        if said := _summary(plan):
            note(said)
        return 0
    plan = _settle(plan, asks=asks)
    if plan.is_empty:
        click.echo(_summary(plan))
    for sentence in installer.apply(plan):
        click.echo(sentence)
    if not host.runs:
        click.echo("No program was run. When the machine runs: gpuspawner init --defaults")
        return 0
    return _start(installer, plan)


def open_host(prefix: Path) -> Host:
    """Return this machine, or one that does not run if its files are below a folder."""
    return LocalHost() if prefix.resolve() == Path("/") else OfflineHost(prefix)


def _require_root(host: Host) -> None:
    if not host.is_root:
        raise Refused("You are not root: run this with sudo.")


def is_terminal() -> bool:
    """Return True if somebody can be asked."""
    return sys.stdin is not None and sys.stdin.isatty()


def _choices(installer: Installer, given: dict[str, Any], *, force: bool, asks: bool) -> Choices:
    catalog = _read_catalog(given["catalog"], installer.files)
    options = Options(
        auth=given["auth"],
        domain=given["domain"],
        database=given["database"],
        admins=given["admins"],
        settings=dict(given["settings"]),
        subnet=given["subnet"],
    )
    known = installer.known_variables()
    interview = Interview(options, installer.record, known, os.environ, asks=asks)
    answers, variables, without = interview.answers()
    database = variables.get(DATABASE_VARIABLE, "")
    return Choices(answers, variables, without, catalog, database, force)


def _read_catalog(file: Path | None, files: FileTree) -> str | None:
    """Return the text of a valid catalog. Raises ConfigError or Refused."""
    if file is None:
        return None
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise Refused(f"The catalog {file} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise Refused(f"The catalog {file} is not text in UTF-8.") from None
    Catalog.from_text(text, str(file), file.parent)
    try:
        Catalog.from_text(text, CATALOG, files.path(CONFIG_FOLDER))
    except ConfigError as error:
        raise Refused(
            f"The catalog {file} names files next to it: copy them to {CONFIG_FOLDER} first. "
            f"{error.message}"
        ) from None
    return text


def _settle(plan: Plan, *, asks: bool) -> Plan:
    """Ask about each edited file that would be replaced. Raises Refused if nobody can be asked."""
    conflicts = plan.conflicts
    if conflicts and not asks:
        names = ", ".join(change.file.path for change in conflicts)
        raise Refused(
            f"Edited since `gpuspawner init` wrote it, or not written by it: {names}. Nothing was "
            "changed. See the difference with --diff; replace it with --force, which keeps the "
            "edited file under another name."
        )
    return plan.settle({change.file.path for change in conflicts if _may_replace(change)})


def _may_replace(change: FileChange) -> bool:
    note(rules.diff_of(change))
    question = f"{change.file.path} was edited. Replace it, and keep a copy of it?"
    return click.confirm(question, default=False, err=True)


def _summary(plan: Plan) -> str:
    if plan.is_empty:
        return "Nothing to change: everything is as it should be."
    lines = []
    if plan.needs_user:
        lines.append("The user gpuspawner is missing.")
    if plan.needs_folder:
        lines.append("The folder of the hub's databases is missing.")
    if plan.needs_network:
        lines.append("The Docker network gpuspawner is missing.")
    return "\n".join(lines)


def _start(installer: Installer, plan: Plan) -> int:
    machine = installer.host.inspect(rules.gateway_of(plan.answers.subnet))
    code = 0

    def check() -> int:
        nonlocal code
        files, host = installer.files, installer.host
        code = run_as_hub(files, host, machine, "gpuspawner", "check", "-f", CONFIG)
        return code

    if machine.has_systemd:
        for sentence in installer.start(check):
            click.echo(sentence)
    else:
        click.echo("systemd does not run here, so nothing was started. Where it runs, type:")
        click.echo("  systemctl enable --now gpuspawner-proxy gpuspawner")
        check()
    if not code:
        for sentence in _next_steps(plan):
            click.echo(sentence)
    return code


def _next_steps(plan: Plan) -> Sequence[str]:
    """Return what an admin should know at the end."""
    answers = plan.answers
    steps = ["The hub's address on this machine: http://127.0.0.1:8000"]
    if answers.domain:
        steps.append(f"For https://{answers.domain}, the first lines of {NGINX} say what to do.")
    if answers.auth == "shared-password":
        steps.append(f"Passwords are in {ENVIRONMENT}: one for members, and one for admins.")
    if answers.admins:
        steps.append(f"Admins: {', '.join(answers.admins)}.")
    steps.append(f"Settings are in {CONFIG}, environments in {CATALOG}.")
    return steps


class UpgradeCommand(Command):
    """Upgrades the hub that ``init`` installed, as the hub's user, unless another hub is named."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        named = ctx.ensure_object(Invocation)
        files, host = FileTree(Path("/")), open_host(Path("/"))
        if named.config or named.database or not (host.is_root and files.read(RECORD)):
            return super().invoke(ctx)
        arguments = ["--json"] if named.json else []
        arguments += ["--no-containers"] if ctx.params["no_containers"] else []
        if file := ctx.params["backup"]:
            arguments += ["--backup", str(file.resolve())]
        return upgrade_installed_hub(files, host, arguments)


def upgrade_installed_hub(files: FileTree, host: Host, arguments: Sequence[str]) -> int:
    """Run the command as the hub's user, to whom the database belongs. Raises Refused."""
    record = files.load_record()
    subnet = record.answers.subnet if record.answers else SUBNET
    machine = host.inspect(rules.gateway_of(subnet))
    if machine.has_systemd and not host.run("systemctl", "is-active", "--quiet", HUB_UNIT).code:
        raise Refused(
            "The hub runs: stop it with systemctl stop gpuspawner, then run this again. The proxy "
            "and members' servers can go on."
        )
    code = run_as_hub(files, host, machine, "gpuspawner", "upgrade", "-f", CONFIG, *arguments)
    if not code and files.path(JUPYTERHUB_DATABASE).exists():
        code = run_as_hub(files, host, machine, "jupyterhub", "upgrade-db", "-f", CONFIG)
        if code:
            note(
                "JupyterHub's own database was not upgraded: the lines above say why. JupyterHub "
                f"copies it before it changes it; the copy is in {STATE_FOLDER}."
            )
    if not code:
        note(
            "Now start the hub: systemctl start gpuspawner\n"
            "To see what this version writes differently: gpuspawner init --diff"
        )
    return code


@click.command("upgrade", cls=UpgradeCommand)
@option("--backup", "FILE", "where the backup goes (default: next to the database)", type=PATH)
@flag("--no-containers", "start no containers in the check, and skip what needs one")
def upgrade(settings: Settings, backup: Path | None, no_containers: bool) -> int:
    """Upgrade the database and check the hub. If one fails, the database is put back.

    A check that was not green before the upgrade does not count.
    """
    settings.require_hub()
    named = click.get_current_context().ensure_object(Invocation)
    command = [sys.executable, "-c", RUN_GPUSPAWNER, "check", "--json"]
    command += ["-f", named.config] if named.config else []
    command += ["--database", named.database] if named.database else []
    command += ["--no-containers"] if no_containers else []
    upgrader = Upgrader(settings.database_url, lambda: run_check(command))
    file = (backup or upgrader.backup_path()).absolute()
    say = note if wants_json() else click.echo
    with closing(upgrader.run(file)) as steps:
        for step in steps:
            say(line_of(step) if isinstance(step, CheckFinding) else step)
    if wants_json():
        value = {"database": str(upgrader.place), "ok": upgrader.ok}
        show(value | {"backup": str(file) if upgrader.changed else None}, "")
    return 0 if upgrader.ok else 1


def run_check(command: Sequence[str]) -> list[CheckFinding]:
    """Run the check in a process of its own. Raises Refused if it says nothing."""
    with tempfile.TemporaryFile() as output:
        code = run_apart(command, stdout=output)
        output.seek(0)
        try:
            found = json.load(output)["checks"]
        except ValueError:
            raise Refused(f"The check ended with {code}, and found nothing.") from None
    return [CheckFinding(**each | {"status": Status(each["status"])}) for each in found]


@click.command()
@yes_option
@prefix_option
def uninstall(prefix: Path, yes: bool) -> int:
    """Remove units, configuration and network. Members' files and the database stay."""
    host = open_host(prefix)
    _require_root(host)
    uninstaller = Uninstaller(FileTree(prefix), host)
    machine = uninstaller.require_installation()
    edited = uninstaller.edited_files()
    note(
        "This stops the hub and its proxy and removes what `gpuspawner init` wrote, with its "
        "secrets. Members' workspaces, the database and backups stay."
    )
    if not yes:
        if not is_terminal():
            raise Refused("Nothing was removed: confirm with --yes.")
        if not click.confirm("Remove it?", default=False, err=True):
            raise Refused("Nothing was removed.")
    variables = rules.read_variables(uninstaller.files.read(ENVIRONMENT) or "")
    for sentence in uninstaller.remove(machine):
        click.echo(sentence)
    click.echo("What is left:")
    for sentence in uninstaller.left(variables, edited):
        click.echo(f"  {sentence}")
    return 0
