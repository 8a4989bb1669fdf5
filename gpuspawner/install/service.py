"""Install a hub on a machine, and remove it again. Every step says what it did."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from ..core.errors import Refused
from . import rules
from .documents import catalog_file, configuration_files, secret_files
from .files import FileTree, is_ours
from .host import Host
from .models import (
    CATALOG,
    CLIENT_SECRET,
    CONFIG,
    CONFIG_FOLDER,
    DATABASE_VARIABLE,
    ENVIRONMENT,
    HUB_UNIT,
    MIG_UNIT,
    NETWORK,
    PROXY_UNIT,
    PROXY_VARIABLE,
    RECORD,
    STATE_FOLDER,
    SUBNET,
    UNIT_FOLDER,
    USER,
    Answers,
    FileAction,
    FileChange,
    Machine,
    ProgramResult,
    Record,
    TargetFile,
)
from .sign_in import SIGN_INS

UNIT_PATHS = frozenset(f"{UNIT_FOLDER}/{name}" for name in (PROXY_UNIT, MIG_UNIT, HUB_UNIT))
SYSTEMD_FOLDERS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin")
"""Where systemd looks for programs."""
RECIPES = frozenset(f"{CONFIG_FOLDER}/auth/{name}.py" for name in SIGN_INS)
"""The files of the sign-ins that have one."""

NGINX_COPY = "/etc/nginx/conf.d/gpuspawner.conf"
"""Where an admin copies nginx's file."""

_DOCKER = ("docker", "network")
NO_ENGINE = (
    "Docker is not responding: see that it runs (systemctl start docker), then run this again."
)


@dataclass(frozen=True, slots=True)
class Choices:
    """Everything that an installation is made from."""

    answers: Answers
    variables: Mapping[str, str]
    """The hub's variables, with their secrets; the client secret of ``oauth`` by its path."""
    without: tuple[str, ...] = ()
    """Variables that the hub must not have."""
    catalog: str | None = None
    """The text of a catalog of the site's own."""
    database: str = ""
    """The URL of a PostgreSQL database; empty for SQLite."""
    force: bool = False
    """True to replace edited files."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What an installation would change."""

    answers: Answers
    changes: tuple[FileChange, ...]
    needs_user: bool
    needs_folder: bool
    needs_network: bool

    @property
    def is_empty(self) -> bool:
        """True if everything is as it should be."""
        idle = (FileAction.NOTHING, FileAction.KEEP)
        same = all(change.action in idle for change in self.changes)
        return same and not (self.needs_user or self.needs_folder or self.needs_network)

    @property
    def conflicts(self) -> list[FileChange]:
        """The files that an admin edited and that would get another text."""
        return [change for change in self.changes if change.action is FileAction.CONFLICT]

    def settle(self, replaced: Collection[str]) -> Plan:
        """Return the plan in which these edited files are replaced and all others kept."""
        changes = (
            replace(
                change,
                action=FileAction.UPDATE if change.file.path in replaced else FileAction.KEEP,
            )
            if change.action is FileAction.CONFLICT
            else change
            for change in self.changes
        )
        return replace(self, changes=tuple(changes))

    def changes_any(self, paths: Collection[str]) -> bool:
        """Return True if one of these files gets another text."""
        changed = (FileAction.CREATE, FileAction.UPDATE)
        return any(c.action in changed and c.file.path in paths for c in self.changes)

    @property
    def changes_proxy_token(self) -> bool:
        """True if the token that hub and proxy share changes."""
        both = (
            (rules.read_variables(c.before or ""), rules.read_variables(c.file.text))
            for c in self.changes
            if c.file.path == ENVIRONMENT
        )
        return any(old.get(PROXY_VARIABLE) != new.get(PROXY_VARIABLE) for old, new in both)


def network_command(subnet: str) -> tuple[str, ...]:
    """Return the command that makes the servers' network, where servers cannot reach each other."""
    return (
        *(*_DOCKER, "create", "--subnet", subnet, "--gateway", rules.gateway_of(subnet)),
        *("-o", "com.docker.network.bridge.enable_icc=false", NETWORK),
    )


def _said(done: ProgramResult) -> str:
    return f" It says: {done.output}" if done.output else ""


def run_program(host: Host, *command: str) -> None:
    """Run a program that changes the machine. Raises Refused if it fails."""
    done = host.run(*command)
    if done.code:
        problem = f"This command failed ({done.code}): {' '.join(command)}."
        raise Refused(f"{problem}{_said(done)}")


def has_network(host: Host, subnet: str) -> bool:
    """Return True if the servers' network is there. Raises Refused if it has other addresses."""
    names = _engine(host, "ls", "--filter", f"name=^{NETWORK}$", "--format", "{{.Name}}")
    if NETWORK not in names.splitlines():
        return False
    form = "{{range .IPAM.Config}}{{.Subnet}} {{end}}"
    found = _engine(host, "inspect", "--format", form, NETWORK).split()
    if subnet not in found:
        raise Refused(
            f"The Docker network {NETWORK} is there with the addresses {' '.join(found)}, not "
            f"{subnet}: name them with --subnet, or remove it: docker network rm {NETWORK}"
        )
    return True


def _engine(host: Host, *command: str) -> str:
    done = host.run(*_DOCKER, *command)
    if done.code:
        raise Refused(f"{NO_ENGINE}{_said(done)}")
    return done.output


def run_as_hub(files: FileTree, host: Host, machine: Machine, program: str, *arguments: str) -> int:
    """Run a program from ``gpuspawner``'s folder like the hub's unit, and return its exit code."""
    variables = rules.read_variables(files.read(ENVIRONMENT) or "")
    variables["PATH"] = f"{machine.bin_folder}:/usr/local/bin:/usr/bin:/bin"
    command = (f"{machine.bin_folder}/{program}", *arguments)
    return host.run_as_hub(command, variables, STATE_FOLDER)


class Installer:
    """Writes the files of a hub, and makes its user, its network and its units."""

    def __init__(self, files: FileTree, host: Host) -> None:
        self.files = files
        self.host = host
        self.record = files.load_record()

    # What is there.

    def known_variables(self) -> dict[str, str]:
        """Return the hub's variables as an earlier ``init`` or an admin wrote them."""
        found = rules.read_variables(self.files.read(ENVIRONMENT) or "")
        if secret := (self.files.read(CLIENT_SECRET) or "").strip():
            found[CLIENT_SECRET] = secret
        return found

    def plan(self, choices: Choices) -> Plan:
        """Return what an installation would change. Raises Refused for what is missing."""
        answers = choices.answers
        machine = self.host.inspect(rules.gateway_of(answers.subnet))
        is_first = not any(self.files.path(path).exists() for path in UNIT_PATHS)
        obstacles = rules.find_obstacles(
            machine, SIGN_INS[answers.auth], answers, choices.database, is_first=is_first
        )
        if found := list(obstacles):
            raise Refused("\n".join(found))
        runs = self.host.runs
        needs_network = runs and not has_network(self.host, answers.subnet)
        return Plan(
            answers,
            tuple(self._change(file, choices.force) for file in self._wanted(choices, machine)),
            needs_user=runs and USER not in machine.users,
            needs_folder=runs and not self.files.is_folder(STATE_FOLDER),
            needs_network=needs_network,
        )

    def _wanted(self, choices: Choices, machine: Machine) -> Iterator[TargetFile]:
        node = str(PurePosixPath(machine.programs["node"]).parent)
        yield from secret_files(choices.variables, choices.without, self.files.read(ENVIRONMENT))
        if choices.catalog is not None or self.files.read(CATALOG) is None:
            yield catalog_file(choices.catalog)
        yield from configuration_files(
            choices.answers,
            bin_folder=machine.bin_folder,
            proxy=machine.programs[rules.PROXY],
            node_path="" if node in SYSTEMD_FOLDERS else node,
        )

    def _change(self, file: TargetFile, force: bool) -> FileChange:
        path = file.path
        hashes = self.record.hashes.get(path, ())
        before, mode = self.files.read(path), self.files.mode(path)
        return rules.decide(file, before, mode, hashes, force=force)

    # Changing it.

    def apply(self, plan: Plan) -> Iterator[str]:
        """Make the changes of a plan, and yield a sentence for each.

        It can be run again after a failure at any point. Raises Refused.
        """
        made_network = self.record.made_network or plan.needs_network
        after = Record(plan.answers, self._hashes(plan, {}), made_network, self._restarts(plan))
        # Until the end, both the old and the new text of a file count as ours: a process may be
        # killed when it has written only some files.
        during = replace(after, hashes=self._hashes(plan, self.record.hashes))
        if not plan.is_empty:
            self.files.save_record(during)
        if plan.needs_user:
            run_program(self.host, "useradd", "--system", "--groups", "docker", USER)
            yield f"Made the user {USER}."
        if plan.needs_folder:
            run_program(
                self.host, *("install", "-d", "-m", "700", "-o", USER, "-g", USER, STATE_FOLDER)
            )
            yield f"Made the folder {STATE_FOLDER}, for the hub's databases."
        if plan.needs_network:
            run_program(self.host, *network_command(plan.answers.subnet))
            yield f"Made the Docker network {NETWORK} ({plan.answers.subnet})."
        for change in plan.changes:
            if sentence := self._apply(change):
                yield sentence
        self.files.save_record(after)
        self.record = after

    def _apply(self, change: FileChange) -> str:
        file, path = change.file, change.file.path
        if change.action is FileAction.CREATE:
            self.files.write(file)
            return f"Wrote {path}."
        if change.action is FileAction.UPDATE:
            kept = self._keep_edited(change)
            self.files.write(file)
            return f"Changed {path}." + (f" The edited file is now {kept}." if kept else "")
        if change.action is FileAction.CLOSE:
            self.files.set_mode(path, file.mode)
            return f"Closed {path} to others (mode {file.mode:o})."
        if change.action is FileAction.KEEP:
            return f"Kept {path}, which was edited."
        return ""

    def _keep_edited(self, change: FileChange) -> str:
        """Copy an edited file, which is about to be replaced, and return the copy's path."""
        path, before = change.file.path, change.before or ""
        if change.file.keeps_edits or is_ours(self.record, path, before):
            return ""
        kept = f"{path}.edited"
        number = 1
        while (found := self.files.read(kept)) is not None and found != before:
            number += 1
            kept = f"{path}.edited-{number}"
        self.files.write(TargetFile(kept, before, self.files.mode(path)))
        return kept

    def _hashes(
        self, plan: Plan, before: Mapping[str, tuple[str, ...]]
    ) -> dict[str, tuple[str, ...]]:
        """Return the hashes of the texts of ours, with those of ``before``."""
        found = dict(self.record.hashes)
        for change in plan.changes:
            path, new = change.file.path, rules.hash_of(change.file.text)
            theirs = change.before is not None and not is_ours(self.record, path, change.before)
            if not (change.file.keeps_edits and theirs):  # an edit in it stays an edit
                found[path] = tuple(dict.fromkeys((*before.get(path, ()), new)))
        return found

    def _restarts(self, plan: Plan) -> tuple[str, ...]:
        """Return the units that have to be restarted, until :meth:`start` has done so."""
        found = set(self.record.restarts)
        if plan.changes_any((f"{UNIT_FOLDER}/{PROXY_UNIT}",)) or plan.changes_proxy_token:
            found.add(PROXY_UNIT)
        hub_files = {CONFIG, ENVIRONMENT, CLIENT_SECRET, f"{UNIT_FOLDER}/{HUB_UNIT}"}
        if plan.changes_any({*hub_files, *RECIPES}):
            found.add(HUB_UNIT)
        return tuple(sorted(found))

    # Starting it.

    def start(self, check: Callable[[], int]) -> Iterator[str]:
        """Start the proxy, check, and start the hub if the check is green. Raises Refused."""
        run_program(self.host, "systemctl", "daemon-reload")
        yield from self._start(PROXY_UNIT, "the proxy")
        yield f"Checking what the hub needs, as the user {USER}:"
        if check():
            is_active = self._is("active", HUB_UNIT)
            state = "goes on with its old configuration" if is_active else "was not started"
            yield f"The hub {state}: correct what failed above, then run `gpuspawner init` again."
            return
        yield from self._start(HUB_UNIT, "the hub")

    def _start(self, unit: str, name: str) -> Iterator[str]:
        is_active = self._is("active", unit)
        if not (is_active and self._is("enabled", unit)):
            run_program(self.host, "systemctl", "enable", "--now", unit)
        if not is_active:
            yield f"Started {name}."
        elif unit in self.record.restarts:
            run_program(self.host, "systemctl", "restart", unit)
            yield f"Restarted {name}. Members' servers went on."
        restarts = tuple(each for each in self.record.restarts if each != unit)
        self.record = replace(self.record, restarts=restarts)
        self.files.save_record(self.record)

    def _is(self, state: str, unit: str) -> bool:
        return self.host.run("systemctl", f"is-{state}", "--quiet", unit).code == 0


class Uninstaller:
    """Removes what ``init`` wrote, and nothing else."""

    def __init__(self, files: FileTree, host: Host) -> None:
        self.files = files
        self.host = host
        self.record = files.load_record()

    def require_installation(self) -> Machine:
        """Return what is on the machine. Raises Refused if there is nothing to remove."""
        if not self.record.hashes:
            raise Refused(
                f"There is nothing to remove: `gpuspawner init` wrote nothing in {CONFIG_FOLDER}."
            )
        subnet = self.record.answers.subnet if self.record.answers else SUBNET
        return self.host.inspect(rules.gateway_of(subnet))

    def edited_files(self) -> list[str]:
        """Return the files that an admin edited, which stay."""
        return [path for path in sorted(self.record.hashes) if self._is_edited(path)]

    def _is_edited(self, path: str) -> bool:
        text = self.files.read(path)
        return text is not None and not is_ours(self.record, path, text)

    def remove(self, machine: Machine) -> Iterator[str]:
        """Remove units, configuration and network, and yield a sentence for each.

        It can be run again after a failure at any point. Raises Refused.
        """
        units = [path for path in sorted(UNIT_PATHS) if self.files.read(path) is not None]
        if units and machine.has_systemd:
            for name in (HUB_UNIT, PROXY_UNIT):
                if f"{UNIT_FOLDER}/{name}" in units:
                    done = self.host.run("systemctl", "disable", "--now", name)
                    if done.code:
                        raise Refused(f"{name} cannot be stopped. systemctl says: {done.output}")
            yield "Stopped the hub and the proxy."
        for path in sorted(self.record.hashes):
            if self.files.read(path) is not None and not self._is_edited(path):
                self.files.remove(path)
                yield f"Removed {path}."
        if units and machine.has_systemd:
            self.host.run("systemctl", "daemon-reload")
        if self.record.made_network and self.host.runs:
            yield self._remove_network(machine)
        self.files.remove(RECORD)
        for folder in (f"{CONFIG_FOLDER}/auth", CONFIG_FOLDER):
            self.files.remove_empty_folder(folder)

    def _remove_network(self, machine: Machine) -> str:
        if "docker" in machine.programs:
            done = self.host.run(*_DOCKER, "rm", NETWORK)
            if not done.code:
                return f"Removed the Docker network {NETWORK}."
            if "not found" in done.output.lower() or "no such network" in done.output.lower():
                return f"The Docker network {NETWORK} was gone already."
            why = f" Docker says: {done.output}"
        else:
            why = ""
        return (
            f"The Docker network {NETWORK} stays, perhaps because servers are still on it "
            f"(docker ps --filter network={NETWORK}). Later: docker network rm {NETWORK}.{why}"
        )

    def left(self, variables: Mapping[str, str], edited: Collection[str]) -> Iterator[str]:
        """Yield what is left, and where."""
        yield f"{STATE_FOLDER}: the hub's databases, backups, cookie secret and id"
        if DATABASE_VARIABLE in variables:
            yield "the PostgreSQL database with leases and credits"
        yield "members' workspaces: docker volume ls --filter name=gpuspawner-work-"
        yield "members' servers that run: docker ps --filter label=gpuspawner.lease"
        yield f"the user {USER}, to whom these files belong"
        for path in edited:
            yield f"{path}, which was edited"
        if others := set(self.files.list(CONFIG_FOLDER)) - set(edited):
            yield f"files that `gpuspawner init` did not write: {', '.join(sorted(others))}"
        if self.files.read(NGINX_COPY) is not None:
            yield f"{NGINX_COPY}, which nginx reads: remove it, then systemctl reload nginx"
