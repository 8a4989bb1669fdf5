"""What the demo keeps between two runs, all in one folder: passwords, files, databases."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import yaml

MEMBERS = tuple(f"member{number}" for number in range(1, 9))
ADMIN = "admin"

LEAST_PASSWORD = 8
"""Characters that JupyterHub's shared-password authenticator asks for."""

_LETTERS = "abcdefghijkmnpqrstuvwxyz23456789"
"""Of generated passwords: none that is mistaken for another."""

SAMPLE = {
    "README.txt": "Data for everybody's servers. iris.csv: sizes of sepals and petals in cm.\n",
    "iris.csv": "sepal_length,sepal_width,petal_length,petal_width,species\n"
    "5.1,3.5,1.4,0.2,setosa\n"
    "4.9,3.0,1.4,0.2,setosa\n"
    "7.0,3.2,4.7,1.4,versicolor\n"
    "6.4,3.2,4.5,1.5,versicolor\n"
    "6.3,3.3,6.0,2.5,virginica\n"
    "5.8,2.7,5.1,1.9,virginica\n",
}
"""A dataset to read, by file name."""


class Stop(Exception):
    """The demo cannot go on; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Passwords:
    """What members and the admin sign in with."""

    members: str
    admin: str


class State:
    """The demo's folder (``.demo``, or GPUSPAWNER_DEMO_DIR), readable by its user only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock: IO[str] | None = None

    def open(self) -> None:
        """Make the folder and keep other demos out of it. Raises Stop."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = open(self.folder / "lock", "a")  # noqa: SIM115 - held while we live
        except OSError as error:
            raise Stop(
                f"The folder {self.folder} cannot be used ({error.strerror}). Name another one: "
                "GPUSPAWNER_DEMO_DIR=... make demo"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Stop(
                f"A demo runs already with the folder {self.folder}. End that one with Ctrl-C, "
                "or name another folder and port: GPUSPAWNER_DEMO_DIR=... "
                "GPUSPAWNER_DEMO_PORT=... make demo"
            ) from None

    @property
    def log(self) -> Path:
        """What hub, proxy, service and servers print."""
        return self.folder / "hub.log"

    @property
    def database_url(self) -> str:
        """Leases and credits."""
        return f"sqlite:///{self.folder}/gpuspawner.sqlite"

    @property
    def new(self) -> bool:
        """Whether no demo ran in this folder yet."""
        return not (self.folder / "gpuspawner.sqlite").exists()

    def name(self) -> str:
        """A short random name of this folder, for what it owns in a container engine."""
        return self._kept("name", lambda: secrets.token_hex(4))

    def passwords(self) -> Passwords:
        """Those of last time, or new ones; GPUSPAWNER_DEMO_PASSWORD goes first. Raises Stop."""
        given = os.environ.get("GPUSPAWNER_DEMO_PASSWORD", "")
        if given and not (len(given) >= LEAST_PASSWORD and given.isascii()):
            raise Stop(
                "GPUSPAWNER_DEMO_PASSWORD cannot be used: it needs at least "
                f"{LEAST_PASSWORD} characters, and plain ones (ASCII)."
            )
        members = given or self._kept("password", _new_password)
        # JupyterHub wants 32 characters of an admin's password, and another one than members'.
        admin = self._kept("admin-password", lambda: secrets.token_urlsafe(24))
        return Passwords(members, admin)

    def datasets(self) -> Path:
        """The folder with the sample dataset; its files cannot be written."""
        folder = self.folder / "datasets" / "sample"
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in SAMPLE.items():
            path = folder / name
            if not path.exists():
                path.write_text(text, encoding="utf-8")
                path.chmod(0o444)
        return folder.parent

    def write_catalog(self, catalog: dict[str, Any]) -> Path:
        """The catalog of this run."""
        path = self.folder / "catalog.yaml"
        header = "# Written by the demo at every start; a real hub's is hub_config/catalog.yaml.\n"
        text = yaml.safe_dump(catalog, sort_keys=False, allow_unicode=True, width=100)
        path.write_text(header + text, encoding="utf-8")
        return path

    def write_configuration(self, file: Path, variables: dict[str, str]) -> Path:
        """The hub's configuration of this run, where the ``gpuspawner`` command finds it too."""
        lines = [
            "# Written by the demo at every start, for its hub and for the gpuspawner command.",
            "import os",
            "",
            *(f"os.environ[{name!r}] = {text!r}" for name, text in sorted(variables.items())),
            "",
            f"load_subconfig({str(file)!r})",
        ]
        path = self.folder / "jupyterhub_config.py"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        path.chmod(0o600)
        return path

    def _kept(self, name: str, make: Callable[[], str]) -> str:
        path = self.folder / name
        if not path.exists():
            part = self.folder / f"{name}.part"
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(f"{make()}\n")
            part.rename(path)
        return path.read_text(encoding="utf-8").strip()


def _new_password() -> str:
    """Easy to type, and too long to guess: every user of this machine can reach the demo."""
    groups = ("".join(secrets.choice(_LETTERS) for _ in range(4)) for _ in range(4))
    return "-".join(groups)


def demo_catalog(
    *,
    image: str,
    pytorch: str = "",
    several: int = 1,
    several_of: str = "",
    datasets: str = "",
) -> dict[str, Any]:
    """Environments with one GPU, with several where that can be, and with none.

    ``several`` is the most GPUs of one server, of the model ``several_of`` (empty: any).
    ``pytorch`` is an image with PyTorch where there is one, ``datasets`` a Docker volume
    that holds the sample.
    """
    one: dict[str, Any] = {
        "slug": "notebook",
        "display_name": "JupyterLab with a GPU",
        "description": "Notebooks and a terminal, and one GPU of your own.",
        "image": image,
        "devices": {"default": 1, "max": 1},
    }
    more: dict[str, Any] = {
        "slug": "several",
        "display_name": "JupyterLab with several GPUs",
        "description": "For training on more than one GPU; you get the best connected ones.",
        "image": image,
        "devices": {"default": 2, "max": several},
    }
    if several_of:
        more |= {"description": f"{more['description']} {several_of} only.", "models": [several_of]}
    none: dict[str, Any] = {
        "slug": "cpu",
        "display_name": "JupyterLab without a GPU",
        "description": "For files, notes and light work. Costs nothing.",
        "image": image,
        "devices": {"max": 0},
    }
    torch: dict[str, Any] = {
        "slug": "pytorch",
        "display_name": "PyTorch",
        "description": "JupyterLab with PyTorch and CUDA.",
        "image": pytorch,
        "devices": {"default": 1, "max": several},
    }
    environments = [*([torch] if pytorch else []), one, *([more] if several > 1 else []), none]
    environments[0]["default"] = True
    catalog: dict[str, Any] = {"environments": environments}
    if datasets:
        catalog["datasets"] = {"sample": {"source": datasets}}
    return catalog
