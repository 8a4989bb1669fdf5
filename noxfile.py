"""`make matrix`: the tests with other versions than those that `make env` installs.

A version of Python that is not on this machine is skipped, and nox says so.
"""

from pathlib import Path

import nox

nox.options.default_venv_backend = "uv"

HERE = Path(__file__).parent
MAIN = "3.11"
PYTHONS = ["3.10", MAIN, "3.12", "3.13"]
PAIRS = {
    "jupyterhub5": ("jupyterhub==5.*", "dockerspawner==13.*", "jupyterhub-idle-culler==1.*"),
    "jupyterhub6": ("jupyterhub==6.*", "dockerspawner==14.*", "jupyterhub-idle-culler==2.*"),
}
EXTRAS = ".[demo,postgres,test,dev,docs]"

ONLY_MAIN = (
    # The documentation describes the newest versions; what is recorded holds HTML and schemas of
    # JupyterHub and pydantic.
    "--ignore=tests/unit/docs",
    "--ignore=tests/integration/docs",
    "--ignore=tests/golden",
)


def run(session: nox.Session, tier: str, *words: str) -> None:
    """Run tests of a tier with what is installed; the proxy is that of `make env`."""
    proxy = Path(session.bin, "configurable-http-proxy")
    proxy.unlink(missing_ok=True)
    proxy.symlink_to(HERE / ".venv/bin/configurable-http-proxy")
    environment = {"GPUSPAWNER_TEST_TIER": tier}
    session.run("pytest", "-q", *words, *ONLY_MAIN, *session.posargs, env=environment)


@nox.session(python=PYTHONS)
@nox.parametrize("pair", list(PAIRS), ids=list(PAIRS))
def quick(session: nox.Session, pair: str) -> None:
    """Run the tests of `make quick` with a pair of JupyterHub and DockerSpawner."""
    session.install("--editable", EXTRAS, *PAIRS[pair])
    run(session, "quick", "-m", "quick", "-n", "2")


@nox.session(python=MAIN)
def hub(session: nox.Session) -> None:
    """Run the tests with hubs with the older pair."""
    session.install("--editable", EXTRAS, *PAIRS["jupyterhub5"])
    run(session, "test", "-m", "not soak", "-n", "3", "--dist", "loadfile", "tests/hub")


@nox.session(python=PYTHONS[0])
def lowest(session: nox.Session) -> None:
    """Run the tests of `make quick` with the lowest versions that setup.cfg allows."""
    session.install("--resolution=lowest-direct", "--editable", EXTRAS)
    run(session, "quick", "-m", "quick", "-n", "2")
