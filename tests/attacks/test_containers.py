"""A member with a terminal in a container, as root there. Real: containers of a Docker Engine with
the hub's own settings, kernels of a member who works meanwhile, processes and logs of this machine.
"""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from tests.support.attack_hub import PIDS, THIEF, VICTIM, AttackHub
from tests.support.attacks import Attempts
from tests.support.hub import ADMIN_PASSWORD, USER_PASSWORD
from tests.support.images import INSTANT
from tests.support.kernel import Kernel
from tests.support.processes import environment_of, wait_for

OUT = {
    "a GPU's device node": "mknod /tmp/gpu c 195 0",
    "a disk's device node": "mknod /tmp/disk b 8 0",
    "the memory's device node": "mknod /tmp/mem c 1 1",
    "a mount": "mount -t tmpfs none /mnt",
    "proc mounted anew": "mount -t proc proc /mnt",
    "a bind mount": "mount --bind / /mnt",
    "datasets made writable": "mount -o remount,rw /datasets/flowers",
    "a file in a dataset": "touch /datasets/flowers/mine",
    "a dataset of others": "ls /datasets/exams",
    "a mount namespace": "unshare -m true",
    "a user namespace": "unshare -rm true",
    "another root": "chroot / true",
    "a raw socket": """perl -MSocket -e 'socket(S, PF_INET, SOCK_RAW, 1) or exit 1'""",
    "a packet socket": """perl -e 'socket(S, 17, 3, 768) or exit 1'""",
    "the machine's namespaces": "nsenter -t 1 -m -u -n -p ls /var/lib/docker",
    "the core pattern": "cd /proc/sys/kernel; echo $(cat core_pattern) > core_pattern",
    "the system request trigger": "echo h > /proc/sysrq-trigger",
    "a release agent": "echo /tmp/evil > /sys/fs/cgroup/memory/release_agent",
    "more memory": "echo -1 > /sys/fs/cgroup/memory/memory.limit_in_bytes",
    "more processes": "echo max > /sys/fs/cgroup/pids/pids.max",
    "to outlive the hub": "echo -1000 > /proc/self/oom_score_adj",
    "the kernel's log": "dmesg | grep -q .",
    "another host name": "hostname evil",
    "another time": 'date -s "$(date)"',
    "the network's addresses": "echo 1 > /proc/sys/net/ipv4/ip_forward",
    "the engine's socket": "ls /var/run/docker.sock || ls /run/docker.sock",
    "a GPU": "ls /dev/nvidia*",
    "Victoria's files": "ls /var/lib/docker/volumes/attacks-victoria",
    "a process of the machine": "grep -l jupyterhub /proc/[0-9]*/comm | grep -q .",
    "a key of the kernel": "cat /proc/kcore | head -c 1 | grep -q .",
}
"""Ways out of a container, and what else of the machine somebody could want: as root inside."""

STOCK = (
    *("a GPU's device node", "a disk's device node", "the memory's device node"),
    *("another root", "a raw socket", "a packet socket"),
)
"""Of these, what works in a container as Docker makes it by itself: each attempt is a real one."""

SETUID = (
    "cp /bin/bash /tmp/root && chmod 4755 /tmp/root && "
    "test $(setpriv --reuid 65534 --clear-groups /tmp/root -p -c 'id -u') = 0"
)

HOG_PROCESSES = """perl -e '
my @all; for (1..3000) {
    my $child = fork; last unless defined $child; if (!$child) { sleep 8; exit } push @all, $child;
}
print scalar @all; sleep 4; kill 9, @all; 1 while wait > 0' """

HOG_MEMORY = """perl -e 'my @a; for (1..256) { push @a, "x" x 8388608 } print "got it all"' """

HOG_DISK = (
    "dd if=/dev/zero of=/dev/shm/large bs=1M count=256; code=$?; rm -f /dev/shm/large; exit $code"
)


def test_root_in_a_container_cannot_escape_it(hub: AttackHub, attempt: Attempts) -> None:
    assert hub.inside("id -u") == (0, "0"), "the worst case: root in the container"
    for what, command in {**OUT, "a setuid program": SETUID}.items():
        code, said = hub.inside(command)
        assert code not in (126, 127), f"{what} was not even tried: {said}"
        attempt(f"{what}: {said[:200]}", refused=code != 0)
    assert hub.inside("cd /home/jovyan/work && touch mine && ls /dev/shm")[0] == 0, (
        "their own works"
    )
    works = " && ".join([*(f"( {OUT[what]} )" for what in STOCK), SETUID])
    code, said = hub.engine.run(INSTANT, ["bash", "-c", works])
    assert code == 0, f"with Docker's defaults alone: {said}"


def test_containers_get_no_dangerous_privileges(hub: AttackHub, attempt: Attempts) -> None:
    for user in (VICTIM, THIEF):
        container = hub.container(user)
        host = container["HostConfig"]
        attempt("privileged", refused=not host["Privileged"])
        attempt("all capabilities", refused=host["CapDrop"] == ["ALL"])
        gained = {"SYS_ADMIN", "MKNOD", "NET_RAW", "NET_ADMIN", "SYS_PTRACE"}
        attempt("capabilities", refused=not gained & set(host["CapAdd"]))
        attempt("setuid", refused=host["SecurityOpt"] == ["no-new-privileges"])
        attempt("processes", refused=host["PidsLimit"] == PIDS)
        attempt("memory", refused=0 < host["Memory"] == host["MemorySwap"])
        attempt("namespaces", refused="host" not in (host["PidMode"], host["NetworkMode"]))
        attempt("mounts", refused="docker.sock" not in json.dumps(container["Mounts"]))
        assert host["OomScoreAdj"] == 500


def test_container_reaches_only_the_hub_api(hub: AttackHub, attempt: Attempts) -> None:
    """From Mallory's container to every port on which hub, proxy and service listen."""
    gateway = hub.engine.gateway
    assert hub.reaches(gateway, hub.hub_port), "the hub's API has to be reached"
    ports = hub.listening() | {hub.service_port, hub.port, hub.proxy_port}
    assert len(ports) >= 4
    for port in ports - {hub.hub_port}:
        attempt(f"port {port} of the machine", refused=not hub.reaches(gateway, port))
    for what, port in {"Docker": 2375, "Docker's TLS": 2376, "PostgreSQL": 5432}.items():
        attempt(what, refused=not hub.reaches(gateway, port))
    # Where packets are lost, all of the time is waited for.
    attempt("metadata of a cloud", refused=not hub.reaches("169.254.169.254", 80, seconds=5))
    # Another member's server opens to nobody without a token of hers. It asks the hub whose this
    # one is: while both have much to do it may say nothing, or that the hub did not respond (5xx).
    networks = hub.container(VICTIM)["NetworkSettings"]["Networks"]
    [address] = [each["IPAddress"] for each in networks.values()]
    token = "$JUPYTERHUB_API_TOKEN"
    for path in ("api/contents", "api/kernels", "api/terminals", "lab"):
        for header in ("", f"Authorization: token {token}\\r\\n"):
            ask = f"GET /user/{VICTIM}/{path} HTTP/1.0\\r\\nHost: x\\r\\n{header}\\r\\n"
            command = f'exec 3<>/dev/tcp/{address}/8888; printf "{ask}" >&3; timeout 60 cat <&3'

            def answer(command: str = command) -> str:
                _, said = hub.inside(command)
                status = said.split(" ")[1] if said.startswith("HTTP/") else ""
                return "" if status.startswith("5") else status

            status = wait_for(answer, f"an answer to {path}")
            attempt(f"{path} of her server: {status}", refused=status in ("302", "401", "403"))


@pytest.mark.parametrize(
    ("command", "failed"),
    [
        (HOG_PROCESSES, lambda code, said: 0 < int(said or 0) < PIDS),
        (HOG_MEMORY, lambda code, said: code != 0 and "got it all" not in said),
        (HOG_DISK, lambda code, said: code != 0 and "No space left" in said),
    ],
    ids=["processes", "memory", "disk"],
)
def test_resource_hog_does_not_affect_other_members(
    hub: AttackHub, attempt: Attempts, command: str, failed: Callable[[int, str], bool]
) -> None:
    """Each ends by itself; meanwhile Victoria computes, and the hub answers."""
    outcome: list[tuple[int, str]] = []
    with Kernel(hub.server_url(VICTIM), hub.user_token(VICTIM), 120) as kernel:
        assert kernel.run("6 * 7") == "42"
        hog = threading.Thread(target=lambda: outcome.append(hub.inside(command)))
        hog.start()
        assert kernel.run("import subprocess, sys\nsum(range(10 ** 6))") == "499999500000"
        echo = "subprocess.run(['echo', 'works'], capture_output=True, text=True).stdout"
        assert "works" in kernel.run(echo)
        assert hub.api("GET", "").ok and hub.server(VICTIM)
        hog.join()
    [(code, said)] = outcome
    attempt(f"{command}: {code} {said[:200]}", refused=failed(code, said))
    assert hub.inside("echo alive") == (0, "alive"), "the thief's own container lives on"
    assert not hub.container(VICTIM)["State"]["OOMKilled"]


def test_secrets_do_not_leak_to_logs_processes_or_containers(
    hub: AttackHub, attempt: Attempts
) -> None:
    """The log, every process of the machine, labels, commands, images, other containers."""
    owners = {user: _tokens_of(hub.container(user)) for user in (VICTIM, THIEF)}
    [service] = [
        environment
        for environment in map(environment_of, hub.children_left())
        if environment.get("JUPYTERHUB_SERVICE_NAME") == "gpu"
    ]
    secrets = {
        "the token of the tests' service": hub.token,
        "the token of our service": service["JUPYTERHUB_API_TOKEN"],
        "the tokens of other services": hub.secret,
        "the proxy's token": hub._proxy_token,
        "the cookie secret": hub._cookie_secret,
        "the password of members": USER_PASSWORD,
        "the password of admins": ADMIN_PASSWORD,
        **{f"the token of {user}'s server": token for user, token in owners.items()},
    }
    log = hub.log_text()
    lines = [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]
    listed = subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True).stdout
    images = json.dumps(
        [hub.engine.client.history(each["Id"]) for each in hub.engine.client.images()]
    )
    assert "GPUs" in log or "Adding role" in log or len(log) > 500
    for what, secret in secrets.items():
        attempt(f"{what} in the hub's log", refused=secret not in log)
        attempt(f"{what} in a command line", refused=not any(secret in line for line in lines))
        attempt(f"{what} in ps", refused=secret not in listed)
        attempt(f"{what} in an image", refused=secret not in images)
        for user, own in owners.items():
            container = hub.container(user)
            told = json.dumps([container["Config"]["Labels"], container["Config"]["Cmd"]])
            attempt(f"{what} in {user}'s labels", refused=secret not in told)
            told = json.dumps(container["Config"]["Env"])
            # By JupyterHub's design a server has its own token, and no other secret.
            attempt(f"{what} in {user}'s container", refused=secret == own or secret not in told)


def test_attacker_leaves_no_audit_entry_and_gets_no_gpu(hub: AttackHub, attempt: Attempts) -> None:
    """After all of it: the trail has no line of Mallory's, and no server of his has a GPU."""
    actors = {row.split("actor=")[-1] for row in hub.kept()["audit"]}
    attempt("a line in the audit log", refused=not any(THIEF in actor for actor in actors))
    attempt("a GPU", refused=all(lease.server.user != THIEF for lease in _with_gpus(hub)))
    wait_for(lambda: hub.server(VICTIM), "Victoria's server, which is still there")


def _with_gpus(hub: AttackHub) -> list[Any]:
    return [lease for lease in hub.leases() if lease.devices]


def _tokens_of(container: dict[str, Any]) -> str:
    environment = dict(item.split("=", 1) for item in container["Config"]["Env"])
    return str(environment["JUPYTERHUB_API_TOKEN"])
