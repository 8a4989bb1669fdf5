"""Values of an installation: the answers, the files that follow from them, and what was found."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

BIN_FOLDER = "/opt/gpuspawner/bin"
"""Where the commands are, in hub_config and in images."""
CONFIG_FOLDER = "/etc/gpuspawner"
CONFIG = f"{CONFIG_FOLDER}/jupyterhub_config.py"
CATALOG = f"{CONFIG_FOLDER}/catalog.yaml"
ENVIRONMENT = f"{CONFIG_FOLDER}/environment"
"""Variables of the hub and the proxy, with their secrets: systemd reads it as root."""
CLIENT_SECRET = f"{CONFIG_FOLDER}/oauth_client_secret"
NGINX = f"{CONFIG_FOLDER}/nginx.conf"
RECORD = f"{CONFIG_FOLDER}/.installed.json"
COMMAND = "/usr/local/bin/gpuspawner"
"""The command for admins: it runs the one of ``BIN_FOLDER`` as the hub's user."""
STATE_FOLDER = "/var/lib/gpuspawner"
"""The hub's working directory: databases, cookie secret and the hub's id."""
JUPYTERHUB_DATABASE = f"{STATE_FOLDER}/jupyterhub.sqlite"
HUB_UNIT, PROXY_UNIT = "gpuspawner.service", "gpuspawner-proxy.service"
MIG_UNIT = "gpuspawner-mig.service"
"""Root's, which runs once before each start of the hub."""
UNIT_FOLDER = "/etc/systemd/system"

USER = "gpuspawner"
ENGINE_GROUP = "docker"
NETWORK = "gpuspawner"
SUBNET = "172.30.0.0/16"

PROXY_VARIABLE = "CONFIGPROXY_AUTH_TOKEN"
"""The variable with the secret of hub and proxy."""
DATABASE_VARIABLE = "GPUSPAWNER_DATABASE_URL"

PRIVATE, PUBLIC, PROGRAM = 0o600, 0o644, 0o755


@dataclass(frozen=True, slots=True)
class Question:
    """One thing that only the site knows about its sign-in."""

    name: str
    """Its name in templates and for ``--set``."""
    prompt: str
    example: str
    """The answer in hub_config."""
    default: str | None = None
    """None: an answer is needed. Empty: the line is left out."""
    variable: str = ""
    """The environment variable of the hub that it becomes; empty: it is in a file."""


@dataclass(frozen=True, slots=True)
class Secret:
    """A secret of the sign-in, which init reads from its environment or asks for."""

    variable: str
    prompt: str
    can_be_made: bool = False
    """True if ``init`` makes a random one when none is given."""
    least: int = 1
    """The fewest characters that JupyterHub accepts."""


@dataclass(frozen=True, slots=True)
class SignIn:
    """A way to sign in."""

    name: str
    title: str
    questions: tuple[Question, ...] = ()
    secrets: tuple[Secret, ...] = ()
    needs_domain: bool = True
    module: str = ""
    """A Python package that it needs besides ours."""
    extra: str = ""
    """The extra of gpuspawner that installs this package."""
    in_file: bool = True
    """True if it has a file of its own in the folder ``auth``."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What an admin chose, without secrets."""

    auth: str
    domain: str = ""
    admins: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    """The answers to the questions of the sign-in, by name."""
    subnet: str = SUBNET


@dataclass(frozen=True, slots=True)
class TargetFile:
    """A file as ``init`` writes it."""

    path: str
    text: str
    mode: int = PUBLIC
    is_secret: bool = False
    """True if it may not be shown as it is."""
    has_variables: bool = False
    """True if its lines are variables; only the secrets among them are hidden."""
    keeps_edits: bool = False
    """True if its text is made from what is there, so that no edit is lost."""


class FileAction(enum.Enum):
    """What happens to a file."""

    CREATE = "create"
    UPDATE = "update"
    CLOSE = "close"
    """Its text stays, its mode is corrected."""
    KEEP = "keep"
    """An admin edited it, and ``init`` has nothing new for it."""
    CONFLICT = "conflict"
    """An admin edited it, and ``init`` would write another text."""
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class FileChange:
    """A file, what is there now, and what happens to it."""

    file: TargetFile
    before: str | None
    """The text that is there; None if there is no file."""
    action: FileAction


@dataclass(frozen=True, slots=True)
class Record:
    """What ``init`` wrote, so that edits and its own texts can be told apart."""

    answers: Answers | None = None
    hashes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """SHA-256 of each text of ours that may be at a path: two while it is being replaced."""
    made_network: bool = False
    restarts: tuple[str, ...] = ()
    """Units whose files changed since they were started."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What an installation finds on the machine."""

    has_systemd: bool
    programs: Mapping[str, str]
    """Paths of the programs that were found, by name."""
    groups: frozenset[str]
    users: frozenset[str]
    """Which of the users that matter here exist."""
    ports_in_use: frozenset[int]
    missing_modules: frozenset[str]
    bin_folder: str
    """Where the ``gpuspawner`` command is."""


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """How a program ended, and what it printed."""

    code: int
    output: str = ""
