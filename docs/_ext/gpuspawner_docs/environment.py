"""Environment variables: the code defines which exist, and the tables here describe them.

The build fails if a program reads a variable that is not described here, and if a variable that is
described here is read by no program.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from gpuspawner.engines.injection import framework_hints
from gpuspawner.spawners.mixin import run_environment

from .page import Generated, plain, table

REPO = Path(__file__).resolve().parents[3]

ADMINS = {
    "CLUSTER_FILE": "Path of the cluster file. Default: `/etc/gpuspawner/cluster.yaml`.",
    "CREDENTIALS_DIRECTORY": "Where systemd puts credentials; a secret there needs no mode 600.",
    "DOCKER_HOST": "Address of the Docker Engine. Also handed to the accounting service.",
    "GPUSPAWNER_DATABASE_URL": "URL of the database; the default of `c.GPUDatabase.url`.",
    "GPUSPAWNER_SIMULATION": "Path of a JSON file that makes simulated GPUs fail.",
    "HUB_BIND_URL": "Where the hub listens for its proxy and for servers.",
    "HUB_CONNECT_URL": "Where servers reach the hub. Default: `HUB_BIND_URL`.",
    "JUPYTERHUB_CRYPT_KEY": "JupyterHub's key for stored sign-in state. With it, groups are asked "
    "for again before each start.",
    "LDAP_PASSWORD": "Of the account that looks people up.",  # pragma: allowlist secret
    "PROXY_API_URL": "Where the hub reaches the proxy's own interface.",
    "SERVICE_URL": "Where the accounting service listens.",
    "SLURM_CONF": "Path of `slurm.conf`, if neither the cluster file nor Slurm's default applies.",
    "TLJH_INSTALL_PREFIX": "The folder of The Littlest JupyterHub. Default: `/opt/tljh`.",
}
"""What an admin may set."""

SECRETS = {
    "CONFIGPROXY_AUTH_TOKEN": "Token with which the hub speaks to its proxy.",
    "OAUTH_CLIENT_SECRET": "The client's secret at the identity provider.",
}
"""Secrets: each may also come from a file, which ``NAME_FILE`` names."""

DEMO = {
    "GPUSPAWNER_DEMO_DIR": "Folder of the demo. Default: `.demo`.",
    "GPUSPAWNER_DEMO_IMAGE": "Base image of the demo's servers, where there is a Docker Engine.",
    "GPUSPAWNER_DEMO_PASSWORD": "Of the members. Default: a new one.",  # pragma: allowlist secret
    "GPUSPAWNER_DEMO_PORT": "Port of the demo. Default: 8000.",
}
"""What ``make demo`` reads."""

SERVICE = {
    "GPUSPAWNER_CONFIG": "The hub's settings, as JSON.",
    "GPUSPAWNER_FRAME": "The settings of the Hub's pages, which frame the service's pages.",
    "GPUSPAWNER_HUB_ID_FILE": "Path of the file with the hub's id.",
    "GPUSPAWNER_HUB_PID": "Process id of the hub: the service ends when that process is gone.",
    "JUPYTERHUB_API_TOKEN": "The service's token at the Hub.",
    "JUPYTERHUB_API_URL": "Address of the Hub's API.",
    "JUPYTERHUB_SERVICE_PREFIX": "Path of the service's pages.",
    "JUPYTERHUB_SERVICE_URL": "Where the service listens.",
}
"""What the hub hands to the accounting service; an admin sets none of it."""

SERVERS = {
    "CUDA_DEVICE_ORDER": "`PCI_BUS_ID`, so that CUDA counts GPUs as `nvidia-smi` does.",
    "GPUSPAWNER_ENVIRONMENT": "The environment's name in the catalog.",
    "GPUSPAWNER_GPU_COUNT": "The number of leased devices.",
    "GPUSPAWNER_GPU_MEMORY": "Of a share of a GPU: its part of the memory, in bytes.",
    "GPUSPAWNER_GPU_MODELS": "Their models, separated by commas.",
    "GPUSPAWNER_GPU_SHARE": "Of a share of a GPU: which part of the device, such as `0.25`.",
    "GPUSPAWNER_GPU_UUIDS": "Their UUIDs, separated by commas.",
    "GPUSPAWNER_LEASE_ID": "The id of the lease; empty without one.",
    "GPUSPAWNER_RATE": "Credits an hour for all leased devices together.",
    "GPUSPAWNER_SCRATCH": "Where the scratch directory is; unset without one.",
    "GPUSPAWNER_WORKSPACE": "Where the workspace is; unset without one.",
    "NVIDIA_DRIVER_CAPABILITIES": "`compute,utility`, unless the environment or the image says "
    "otherwise.",
    "NVIDIA_VISIBLE_DEVICES": "The UUIDs of the leased devices, or `void`.",
    "TF_FORCE_GPU_ALLOW_GROWTH": "Of a share of a GPU: `true`, unless the environment sets it.",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "Of a share of a GPU: nine tenths of it, for JAX, unless the "
    "environment sets it.",
}
"""What a server finds."""

RUNS = {
    "GPUSPAWNER_RESTARTS": "How often it began again.",
    "GPUSPAWNER_RUN_FOLDER": "The folder of its output.",
    "GPUSPAWNER_RUN_ID": "Its id.",
    "GPUSPAWNER_RUN_SECONDS": "Its time limit; empty without one.",
    "GPUSPAWNER_RUN_WORK": "What it carries out, as JSON.",
    "GPUSPAWNER_STOP_AT": "When its time limit is over, as ISO 8601.",
}
"""What a run finds besides."""

ELSEWHERE = frozenset(("PATH", "SUDO_USER", "URL")) | {
    f"JUPYTERHUB_SSL_{name}" for name in ("CERTFILE", "CLIENT_CA", "KEYFILE")
}
"""Read, but not meant for gpuspawner: the shell's own, one that a check sets itself, and those that
JupyterHub gives a server whose traffic it encrypts."""


def read_by_programs() -> dict[str, set[str]]:
    """Return each variable that a program of ours reads, with the files that read it."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in _programs():
        for name in _names_in(path):
            found[name].add(str(path.relative_to(REPO)))
    return found


def _programs() -> Iterator[Path]:
    yield from sorted((REPO / "gpuspawner").rglob("*.py"))
    yield from sorted((REPO / "hub_config").rglob("*.py"))
    yield from sorted((REPO / "scripts").glob("demo*.py"))


@cache
def _constants() -> dict[str, set[str]]:
    """Return the texts that modules of ours give a name in capitals."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in _programs():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Constant)
                and re.fullmatch(r"[A-Z][A-Z0-9_]{3,}", str(node.value.value))
            ):
                for target in node.targets:
                    if isinstance(target, ast.Name) and target.id.isupper():
                        found[target.id].add(str(node.value.value))
    return found


def _names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: set[str] = set()
    for node in ast.walk(tree):
        key: ast.expr | None = None
        if isinstance(node, ast.Subscript) and _is_environ(node.value):
            key = node.slice
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "get" and _is_environ(node.func.value) and node.args:
                key = node.args[0]
        elif isinstance(node, ast.Call) and _is_secret(node.func) and "hub_config" in path.parts:
            key = node.args[0]
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            found.add(key.value)
        elif isinstance(key, ast.Name):
            found |= _constants().get(key.id, set())
        elif isinstance(key, ast.Attribute):
            known = _constants().get(key.attr, set())
            found |= {name for name in known if name.startswith("GPUSPAWNER_")}
    return found


def _is_secret(node: ast.expr) -> bool:
    """Return True for the function with which hub_config/jupyterhub_config.py reads secrets."""
    return isinstance(node, ast.Name) and node.id == "secret"


def _is_environ(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "environ"


def given_to_servers() -> set[str]:
    """Return the variables that a spawner sets for its server."""
    path = REPO / "gpuspawner" / "spawners" / "mixin.py"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name == "with_lease_environment":
            words = {each.arg for each in ast.walk(node) if isinstance(each, ast.keyword)}
            words |= {
                str(each.args[0].value)
                for each in ast.walk(node)
                if isinstance(each, ast.Call)
                and isinstance(each.func, ast.Attribute)
                and each.func.attr == "setdefault"
                and isinstance(each.args[0], ast.Constant)
            }
            given = {word for word in words if word and word.isupper()}
            return given | _given_in_docker() | set(framework_hints(1.0))
    raise LookupError(f"{path} has no with_lease_environment")


def _given_in_docker() -> set[str]:
    """Return the variables that the spawner for Docker adds."""
    path = REPO / "gpuspawner" / "spawners" / "docker.py"
    return set(re.findall(r'env\["(GPUSPAWNER_[A-Z_]+)"\] = ', path.read_text(encoding="utf-8")))


def given_to_runs() -> set[str]:
    """Return the variables that a run has, besides those of a server."""
    program = (REPO / "gpuspawner" / "runs" / "run_program.py").read_text(encoding="utf-8")
    found = re.findall(r'"(GPUSPAWNER_[A-Z_]+)"', program + inspect.getsource(run_environment))
    return set(found) - set(SERVERS)


def problems() -> Iterator[str]:
    """Yield a sentence for each variable without a line, and for each line without a variable."""
    read = set(read_by_programs())
    described = {*ADMINS, *SECRETS, *DEMO, *SERVICE}
    for name in sorted(read - described - ELSEWHERE - set(SERVERS) - set(RUNS)):
        yield f"{name} is read by {', '.join(sorted(read_by_programs()[name]))}: describe it"
    for name in sorted(described - read):
        yield f"{name} is described, and nothing reads it"
    for name in sorted(given_to_servers() ^ set(SERVERS)):
        yield f"{name} is not the same in the code and in the table of what a server finds"
    for name in sorted(given_to_runs() ^ set(RUNS)):
        yield f"{name} is not the same in the code and in the table of what a run finds"


class EnvironmentVariables(Generated):
    """``{environment-variables} admins``: one of the tables of this module."""

    required_arguments = 1

    def markdown(self) -> Iterator[str]:
        """Yield the table."""
        tables = {
            "admins": ADMINS,
            "secrets": SECRETS,
            "demo": DEMO,
            "service": SERVICE,
            "servers": SERVERS,
            "runs": RUNS,
        }
        chosen = tables[self.arguments[0]]
        rows = ((f"`{name}`", plain(told)) for name, told in sorted(chosen.items()))
        yield from table(("Variable", "Meaning"), rows)
