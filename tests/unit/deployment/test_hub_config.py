"""The files in hub_config, read as their programs read them. Nothing is started."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from dockerspawner import DockerSpawner
from jupyterhub.app import JupyterHub
from jupyterhub.proxy import ConfigurableHTTPProxy
from jupyterhub.spawner import Spawner
from traitlets import HasTraits
from traitlets.config import Config
from traitlets.config.loader import PyFileConfigLoader

from gpuspawner.auth import MemberOAuthenticator, MemberSharedPasswordAuthenticator
from gpuspawner.catalog.loader import Catalog, load
from gpuspawner.settings import CLASSES as SETTINGS
from gpuspawner.slurm.cluster import read_cluster
from gpuspawner.spawners.docker import GPUDockerSpawner
from gpuspawner.spawners.local import GPULocalSpawner
from gpuspawner.spawners.mixin import GPUSpawnerMixin
from gpuspawner.spawners.slurm import GPUSlurmSpawner
from scripts.demo_state import MEMBERS, demo_catalog
from tests.support import steps
from tests.support.doc_blocks import shell_in
from tests.support.processes import REPO

HERE = REPO / "hub_config"
OF_HUB = ("gpuspawner.service", "gpuspawner-mig.service", "gpuspawner-proxy.service")
UNITS = (*OF_HUB, "slurm/gpuspawner-sampler.service")
CLASSES: dict[str, type[HasTraits]] = {
    each.__name__: each
    for each in (
        *SETTINGS,
        ConfigurableHTTPProxy,
        DockerSpawner,
        GPUDockerSpawner,
        GPULocalSpawner,
        GPUSlurmSpawner,
        GPUSpawnerMixin,
        JupyterHub,
        MemberOAuthenticator,
        MemberSharedPasswordAuthenticator,
        Spawner,
    )
}
ENVIRONMENT_FILE = "/etc/gpuspawner/environment"
ENVIRONMENT = re.compile(r"HUB_|PROXY_|SERVICE_|OAUTH|CONFIGPROXY|GPUSPAWNER_|PG")

Read = Callable[..., Config]


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    """Read a configuration as JupyterHub does, with these variables and no others of ours."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if ENVIRONMENT.match(name):
            monkeypatch.delenv(name)

    def read(name: str, **environment: str) -> Config:
        for variable, value in environment.items():
            monkeypatch.setenv(variable, value)
        return PyFileConfigLoader(name, path=str(HERE)).load_config()

    return read


def check_settings(c: Config) -> None:
    """Every setting is one that its class has: JupyterHub only warns of a misspelt one."""
    assert c
    for section, settings in c.items():
        unknown = set(settings) - set(CLASSES[section].class_trait_names(config=True))
        assert not unknown, f"c.{section} has no {unknown}"


def services(c: Config) -> list[dict[str, Any]]:
    """The services that the configuration adds to JupyterHub's own, which are none."""
    return list(c.JupyterHub.services.get_value([]))


# Production.


def test_production_config_is_short_and_uses_known_settings(read: Read) -> None:
    check_settings(read("jupyterhub_config.py"))
    assert len((HERE / "jupyterhub_config.py").read_text().splitlines()) <= 60
    for environment in load(HERE / "catalog.yaml").environments:
        found = re.fullmatch(r"gpuspawner/(\w+):latest", environment.image)
        assert found, environment.image
        text = (REPO / "images" / found[1] / "Dockerfile").read_text()
        assert re.search(r"^ARG BASE_IMAGE\b.*\n+FROM \$\{BASE_IMAGE\}", text, re.MULTILINE)


def test_production_config_follows_environment_variables(read: Read) -> None:
    plain = read("jupyterhub_config.py", CONFIGPROXY_AUTH_TOKEN="token")
    assert plain.JupyterHub.hub_connect_url == plain.JupyterHub.hub_bind_url
    assert plain.ConfigurableHTTPProxy.auth_token == "token"
    assert services(plain)[0]["url"] == "http://127.0.0.1:10190"
    assert plain.GPUDatabase.url == "sqlite:///gpuspawner.sqlite"

    postgres = "postgresql://gpuspawner@db/gpuspawner"
    compose = read(
        "jupyterhub_config.py",
        HUB_BIND_URL="http://0.0.0.0:8081",
        HUB_CONNECT_URL="http://hub:8081",
        SERVICE_URL="http://hub:10190",
        GPUSPAWNER_DATABASE_URL=postgres,
    )
    assert compose.JupyterHub.hub_connect_url == "http://hub:8081"
    service = services(compose)[0]
    assert service["url"] == "http://hub:10190"
    assert service["environment"]["GPUSPAWNER_DATABASE_URL"] == postgres


def test_secret_is_read_from_environment_or_private_file(
    read: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def secret(**environment: str) -> Any:
        return read("jupyterhub_config.py", **environment).MemberOAuthenticator.client_secret

    assert secret(OAUTH_CLIENT_SECRET="one") == "one"
    path = tmp_path / "secret"
    path.write_text("two\n")
    path.chmod(0o600)
    assert secret(OAUTH_CLIENT_SECRET_FILE=str(path)) == "two"

    # Systemd gives a service its credentials by an access list, which shows as the group's bits.
    path.chmod(0o440)
    assert secret(CREDENTIALS_DIRECTORY=str(tmp_path)) == "two"
    monkeypatch.delenv("CREDENTIALS_DIRECTORY")

    for mode in (0o640, 0o604, 0o644):
        path.chmod(mode)
        with pytest.raises(SystemExit, match=f"Others can read .* chmod 600 {path}"):
            secret()


# Several machines.


def test_multi_node_config_uses_known_settings(read: Read) -> None:
    c = read("slurm/nodes.py", CLUSTER_FILE="/srv/cluster.yaml")
    check_settings(c)
    assert c.GPUSlurm.cluster_file == "/srv/cluster.yaml"
    assert "{username}" in c.GPUDockerSpawner.workspace
    assert not c.DockerSpawner.use_internal_ip
    cluster = read_cluster(HERE / "slurm/cluster.yaml")
    assert [node.name for node in cluster.nodes] == ["head", "gpu2"]
    assert "h100" in {device.gres for node in cluster.nodes for device in node.devices}
    assert cluster.node("gpu2").device_at(0).file == "/dev/nvidia0"


def run_script(name: str, **environment: str) -> tuple[int, str]:
    command = [HERE / f"slurm/gpuspawner-{name}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize("name", ["epilog", "prolog"])
def test_slurm_hooks_fail_if_docker_does_not_answer(name: str, tmp_path: Path) -> None:
    """Slurm drains the node then, and gives its GPUs to nobody."""
    silent = {"DOCKER_HOST": f"unix://{tmp_path}/none", "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n"}
    code, said = run_script(name, **silent)
    assert code == 1 and f"gpuspawner-{name}: cannot ask Docker" in said


@pytest.mark.parametrize("job", ["", "7; reboot", "-1", "7 8"])
def test_epilog_rejects_invalid_job_ids(job: str) -> None:
    code, said = run_script("epilog", SLURM_JOB_ID=job)
    assert code == 1 and "no job is named" in said


def test_node_certificates_are_private_and_survive_reruns(tmp_path: Path) -> None:
    script, folder = HERE / "slurm/certificates", tmp_path / "tls"

    def run(*addresses: str) -> int:
        return subprocess.run([script, folder, *addresses], capture_output=True).returncode

    assert run("10.0.0.11", "gpu2") == 0
    kept = {path: path.read_bytes() for path in folder.rglob("*.pem")}
    assert run("gpu2", "gpu3") == 0
    assert all(path.read_bytes() == content for path, content in kept.items())
    for address in ("10.0.0.11", "gpu2", "gpu3"):
        key = folder / address / "server-key.pem"
        assert key.stat().st_mode & 0o077 == 0
        context = ssl.create_default_context(cafile=str(folder / address / "ca.pem"))
        context.load_cert_chain(folder / address / "server-cert.pem", key)
    assert (folder / "key.pem").stat().st_mode & 0o077 == 0
    assert run("gpu2;id") == run("-x") == run() == 2


# Trying out.


@pytest.mark.parametrize("docker", ["", "172.17.0.1"])
def test_demo_config_requires_password_and_uses_known_settings(
    docker: str, read: Read, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match="Set GPUSPAWNER_DEMO_PASSWORD"):
        read("try_out.py")
    c = read(
        "try_out.py", GPUSPAWNER_DEMO_PASSWORD="password", GPUSPAWNER_DEMO_DOCKER_ADDRESS=docker
    )
    check_settings(c)
    assert c.JupyterHub.spawner_class == ("gpu-docker" if docker else "gpu-local")
    assert c.JupyterHub.bind_url == "http://127.0.0.1:8000/"
    assert c.MemberSharedPasswordAuthenticator.allowed_users == set(MEMBERS)
    assert (tmp_path / ".demo").is_dir()
    assert [service["name"] for service in services(c)] == ["gpu", "idle-culler"]


@pytest.mark.parametrize(
    ("choice", "slugs", "usual"),
    [
        ({}, ["notebook", "cpu"], "notebook"),
        ({"several": 2}, ["notebook", "several", "cpu"], "notebook"),
        (
            {"several": 4, "several_of": "A100", "pytorch": "torch:1", "datasets": "volume"},
            ["pytorch", "notebook", "several", "cpu"],
            "pytorch",
        ),
    ],
)
def test_demo_catalog_offers_the_chosen_environments(
    choice: dict[str, Any], slugs: list[str], usual: str
) -> None:
    catalog = Catalog.from_mapping(demo_catalog(image="base:1", **choice))
    assert [each.slug for each in catalog.environments] == slugs
    assert catalog.default_for(()).slug == usual
    assert catalog.environments[-1].cpu_only
    if "several_of" in choice:
        assert catalog.get("several").models == ("A100",)
        assert [mount.target for mount in catalog.datasets] == ["/datasets/sample"]


# Deployment.


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((HERE / "compose.yaml").read_text())
    return loaded


def test_install_steps_set_every_required_variable(compose: dict[str, Any]) -> None:
    text = (HERE / "jupyterhub_config.py").read_text()
    needed = set(re.findall(r'secret\("([A-Z0-9_]+)"', text))
    needed |= set(re.findall(r"\bOAUTH2?_[A-Z_]+", text))
    needed.add("JUPYTERHUB_CRYPT_KEY")
    assert len(needed) > 6
    typed = "\n".join(shell_in(steps.COMPOSE))
    given = set(re.findall(r"^([A-Z0-9_]+)=", typed, re.MULTILINE))
    hub = compose["services"]["hub"]
    unit = (HERE / "gpuspawner.service").read_text()
    assert hub["env_file"] == ENVIRONMENT_FILE and f"EnvironmentFile={ENVIRONMENT_FILE}" in unit
    for other in (set(hub["environment"]), set(re.findall(r"Environment=(\w+)=", unit))):
        assert needed <= given | {name.removesuffix("_FILE") for name in other}
    # What has a default is where units and compose both have it.
    assert not set(hub["environment"]) & {"HUB_BIND_URL", "PROXY_API_URL", "SERVICE_URL"}


def test_compose_isolates_engine_and_database_from_members(
    compose: dict[str, Any],
) -> None:
    services = compose["services"]
    sockets = [name for name, s in services.items() if "docker.sock" in str(s.get("volumes"))]
    assert sockets == ["hub"]
    modes = {name: service["network_mode"] for name, service in services.items()}
    assert modes == {"hub": "host", "proxy": "host", "db": "none"}
    assert "networks" not in compose and not any("ports" in s for s in services.values())
    assert services["db"]["command"] == ["postgres", "-c", "listen_addresses="]
    for name, service in services.items():
        assert service["security_opt"] == ["no-new-privileges:true"], name
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source.startswith("/") or source in compose["volumes"], volume


def test_units_and_compose_use_the_same_addresses(compose: dict[str, Any], read: Read) -> None:
    unit = (HERE / "gpuspawner-proxy.service").read_text().replace("\\\n", " ")
    (started,) = re.findall(r"^ExecStart=(.+)$", unit, re.MULTILINE)
    command = " ".join(compose["services"]["proxy"]["command"])
    assert command.replace("=", " ").split()[1:] == started.split()[1:]
    options = dict(zip(started.split()[1::2], started.split()[2::2], strict=True))
    c = read("jupyterhub_config.py")
    assert options["--error-target"] == f"{c.JupyterHub.hub_bind_url}/hub/error"
    api = f"http://{options['--api-ip']}:{options['--api-port']}"
    assert api == c.ConfigurableHTTPProxy.api_url
    assert options["--ip"] == options["--api-ip"] == "127.0.0.1"

    create = shlex.split(steps.command(steps.COMPOSE, "docker network create "))
    assert create[-1] == c.DockerSpawner.network_name
    gateway = create[create.index("--gateway") + 1]
    assert c.JupyterHub.hub_bind_url == f"http://{gateway}:8081"
    assert "com.docker.network.bridge.enable_icc=false" in create


MADE = {
    "/opt/gpuspawner/bin/jupyterhub": "/opt/gpuspawner/bin/pip install",
    "/opt/gpuspawner/bin/gpuspawner": "/opt/gpuspawner/bin/pip install",
    "/opt/gpuspawner/bin/configurable-http-proxy": "npm install --global --prefix /opt/gpuspawner",
    "/opt/gpuspawner/bin": "python3 -m venv /opt/gpuspawner",
    "/opt/gpuspawner": "python3 -m venv /opt/gpuspawner",
    "/etc/gpuspawner": "install -d -m 755 /etc/gpuspawner",
    "/etc/gpuspawner/jupyterhub_config.py": "hub_config/jupyterhub_config.py",
    "/etc/gpuspawner/environment": "install -m 600 /dev/null /etc/gpuspawner/environment",
    "/etc/gpuspawner/oauth_client_secret": "install -m 600 /dev/null"
    " /etc/gpuspawner/oauth_client_secret",
}
"""Each path of ours, and the step that makes it. `gpuspawner init` makes all but the first four."""


def all_steps() -> str:
    """What the pages on the two ways to install say, a command on each line."""
    blocks = [block for page in (steps.BOX, steps.COMPOSE) for block in shell_in(page)]
    return "\n".join(line for block in blocks for line in steps.joined(block))


@pytest.mark.parametrize("name", [*OF_HUB, "Dockerfile", "compose.yaml", "jupyterhub_config.py"])
def test_every_deployment_path_is_created_by_the_steps(name: str) -> None:
    assert not re.search(r"/(?:opt|etc|srv)/jupyterhub", all_steps())
    paths = set(re.findall(r"/(?:opt|etc)/[\w./-]*\w", (HERE / name).read_text()))
    for path in paths - {"/etc/systemd/system"}:
        assert MADE[path] in all_steps(), path
    for path in set(re.findall(r"/(?:opt|etc)/gpuspawner[\w./-]*", all_steps())):
        known = path.rstrip("/") in MADE or path.endswith(("/pip", "/python"))
        assert known, f"{path} is in the steps, and nobody makes it"


def test_install_steps_appear_once_and_copy_existing_files() -> None:
    copied = set(re.findall(r"\b(?:hub_config|images)/[\w./-]+", all_steps()))
    assert len(copied) > 4
    for path in copied:
        assert (REPO / path).exists(), path

    for name in (*OF_HUB, "compose.yaml", "jupyterhub_config.py"):
        comments = re.findall(r"^ *#.*$", (HERE / name).read_text(), re.MULTILINE)
        typed = r"#\s+(?:sudo|pip|npm|cp|useradd|docker (?:network|compose)|systemctl|openssl)\b"
        assert not [line for line in comments if re.match(typed, line.strip())], name
        text = (HERE / name).read_text()
        assert "gpuspawner init" in text or str(steps.COMPOSE.relative_to(REPO)) in text, name


def test_cloud_init_types_the_steps_of_the_tutorial() -> None:
    """Its own words: apt asks nobody, and no folder is changed."""
    config = yaml.safe_load((HERE / "cloud-init.yaml").read_text())
    assert (HERE / "cloud-init.yaml").read_text().startswith("#cloud-config\n")
    packages = " ".join(config["packages"])
    typed = [line for block in shell_in(steps.BOX)[:4] for line in steps.joined(block)]
    source = "/usr/local/src/gpuspawner"
    expected = [
        line.replace("install .", f"install {source}")
        .replace(" images/build", f" {source}/images/build")
        .replace("apt-get install --no", "apt-get install --yes --no")
        .replace("'", "")
        for line in typed
        if line not in ("apt-get update", f"cd {source}", f"apt-get install {packages[10:]}")
        and line != "apt-get install docker.io"
    ]
    assert packages == "docker.io git python3-venv"
    assert config["runcmd"] == expected


def test_hub_dockerfile_takes_its_base_image_as_argument(compose: dict[str, Any]) -> None:
    build = compose["services"]["hub"]["build"]
    dockerfile = (HERE / build["context"] / build["dockerfile"]).resolve()
    text = dockerfile.read_text()
    assert text.index("ARG BASE_IMAGE=") < text.index("FROM ${BASE_IMAGE}")
    for source in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE):
        for path in source.split():
            assert path.endswith("*") or (REPO / path).exists(), path
    assert "/etc/gpuspawner:/etc/gpuspawner:ro" in compose["services"]["hub"]["volumes"]
    assert "/etc/gpuspawner/jupyterhub_config.py" in text


@pytest.mark.parametrize("name", UNITS)
def test_systemd_units_are_hardened_and_valid(name: str, tmp_path: Path) -> None:
    text = (HERE / name).read_text()
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # how the module says it
    unit.read_string(text)
    service = unit["Service"]
    assert service["ProtectSystem"] == "strict"
    if "mig" in name:  # root's; the hub's unit starts it
        assert unit.sections() == ["Unit", "Service"] and "User" not in service
    else:
        assert unit.sections() == ["Unit", "Service", "Install"]
        assert service["NoNewPrivileges"] == "yes" and service["CapabilityBoundingSet"] == ""
        assert "@clock" not in text
    if "proxy" not in name:  # NVML needs NVIDIA's; ProtectClock closes them before systemd 253
        closes_devices = {"DeviceAllow", "DevicePolicy", "PrivateDevices", "ProtectClock"}
        assert not closes_devices & {*service}
    assert service["ExecStart"].startswith("/opt/gpuspawner/bin/")
    if systemd := shutil.which("systemd-analyze"):
        for other in UNITS:  # with programs that this machine has
            known = re.sub(r"/opt/gpuspawner/bin/\S+", "/bin/true", (HERE / other).read_text())
            (tmp_path / Path(other).name).write_text(known)
        done = subprocess.run(
            [systemd, "verify", str(tmp_path / Path(name).name)], capture_output=True, text=True
        )
        assert done.returncode == 0 and str(tmp_path) not in done.stderr, done.stderr
