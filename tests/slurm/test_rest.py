"""slurmrestd in the place of Slurm's programs. Real: slurmrestd, Slurm with two nodes, a hub that
has none of the programs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pytest
import yaml
from traitlets.config import Config

from gpuspawner.cli.check_slurm import check_rest, check_slurm
from gpuspawner.cli.hub import open_hub
from gpuspawner.core.errors import SlurmRefused, SlurmUnavailable
from gpuspawner.core.units import MICRO
from gpuspawner.engines.preflight import Status
from gpuspawner.leases.models import LeaseState, Request, ServerRef
from gpuspawner.queue.models import Ticket
from gpuspawner.slurm.cluster import read_cluster
from gpuspawner.slurm.priority import FIRST
from gpuspawner.slurm.programs import Controller, Holder, Slurm
from gpuspawner.slurm.scheduler import SlurmDelegate
from tests.support.processes import BIN, wait_for
from tests.support.slurm_cluster import SlurmCluster
from tests.support.slurm_hub import SlurmHub, described
from tests.support.slurm_rest import Cable, SlurmRest
from tests.support.tls import make_certificates

WAYS = ("programs", "slurmrestd")


@pytest.fixture(scope="module")
def shared_rest(
    shared_cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SlurmRest]:
    for user in ("ann", "bob"):
        shared_cluster.user(user)
    with SlurmRest(shared_cluster, tmp_path_factory.mktemp("rest")) as rest:
        yield rest


@pytest.fixture
def rest(shared_rest: SlurmRest, cluster: SlurmCluster) -> Iterator[SlurmRest]:
    """With no job before and after the test, and there again if a test failed without it."""
    yield shared_rest
    shared_rest.mend()


@pytest.fixture
def make(rest: SlurmRest, tmp_path: Path) -> Callable[[Controller], SlurmDelegate]:
    """What makes a delegate that reaches Slurm in some way."""
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(described(rest.cluster)), encoding="utf-8")
    return lambda controller: SlurmDelegate(read_cluster(file), controller)


def ticket(number: int, user: str = "ann", seconds: int = 3600, boost: float = 0.0) -> Ticket:
    return Ticket(
        id=f"{number:016x}",
        server=ServerRef(user, f"s{number}"),
        request=Request(devices=1),
        created_at=datetime.now(timezone.utc),
        seconds=seconds,
        boost=boost,
    )


def devices(delegate: SlurmDelegate, ticket: Ticket) -> tuple[str, ...]:
    turn = delegate.turns().get(ticket.id)
    return turn.uuids if turn else ()


def told_of(cluster: SlurmCluster, ticket: Ticket) -> dict[str, str]:
    """What Slurm itself says of a ticket's job."""
    number = cluster.run("squeue", "-h", "-n", f"gpuspawner-{ticket.id}", "-o", "%i").strip()
    said = cluster.run("scontrol", "-o", "show", "job", number)
    return dict(word.partition("=")[::2] for word in said.split() if "=" in word)


@pytest.mark.parametrize("way", WAYS)
def test_the_whole_life_of_tickets(
    way: str, make: Callable[[Controller], SlurmDelegate], rest: SlurmRest
) -> None:
    """Both ways come to the same: whose job, which devices, longer, held, first, ended."""
    cluster = rest.cluster
    programs = Slurm(conf=str(cluster.conf), seconds=60)
    delegate = make(rest.controller() if way == "slurmrestd" else programs)
    running = [ticket(number) for number in range(3)]
    with ThreadPoolExecutor(9) as threads:  # who asks and the rounds race
        list(threads.map(delegate.submit, running * 3))
    assert len(cluster.run("squeue", "-h", "-o", "%j").split()) == 3
    wait_for(lambda: all(devices(delegate, each) for each in running), "three that run")
    given = [uuid for each in running for uuid in devices(delegate, each)]
    assert len(given) == len(set(given)) == 3

    said = told_of(cluster, running[0])
    assert said["UserId"].startswith("ann(") and said["JobState"] == "RUNNING"
    assert (said["TimeLimit"], said["Requeue"], said["WorkDir"]) == ("01:20:00", "0", "/")
    assert '"ann/s0"' in cluster.run("scontrol", "show", "job", said["JobId"])
    delegate.extend(running[0].id, 7200)
    assert told_of(cluster, running[0])["TimeLimit"] == "02:20:00"
    with pytest.raises(SlurmRefused, match="lets nothing run for over 24 h"):
        delegate.extend(running[0].id, 90_000)

    # In line: with an admin's points, held for a pause, and at an admin's place.
    one, two = ticket(10, boost=2.5), ticket(11, "bob")
    for each in (one, two):
        delegate.submit(each)

    def tended(key: str, *wanted: str, paused: bool = False, place: int | None = None) -> None:
        """As the rounds of a hub do it, until Slurm says so of both."""

        def look() -> bool:
            delegate.turns()
            delegate.tend([one, replace(two, position=place)], paused=paused)
            return tuple(told_of(cluster, each)[key] for each in (one, two)) == wanted

        wait_for(look, f"{key} to be {wanted}", interval=0.5)

    tended("Nice", "-2500", "0")
    assert told_of(cluster, two)["UserId"].startswith("bob(")
    tended("Priority", "0", "0", paused=True)
    tended("Reason", "Priority", "Resources", place=1)
    assert told_of(cluster, two)["Priority"] == str(FIRST - 1)
    ours = [told_of(cluster, each)["JobId"] for each in (one, two)]
    told = "".join(cluster.run("scontrol", "show", "job", number) for number in ours)
    assert "held for a pause" not in told and '{"server": "bob/s11"}' in told

    delegate.cancel(running[1].id)
    wait_for(lambda: devices(delegate, two), "the first in line to run")
    wait_for(lambda: delegate.turns()[running[1].id].over, "the end of the other")
    assert not devices(delegate, one) and delegate.turns()[one.id].place == 1
    for each in (*running, one, two):
        delegate.cancel(each.id)
        delegate.cancel(each.id)  # there is none any more
    wait_for(lambda: not cluster.run("squeue", "-h", "-o", "%i"), "all jobs to end")


@pytest.mark.parametrize("way", WAYS)
def test_a_no_is_said_in_the_same_words(
    way: str, make: Callable[[Controller], SlurmDelegate], rest: SlurmRest
) -> None:
    programs = Slurm(conf=str(rest.cluster.conf), seconds=60)
    controller: Controller = rest.controller() if way == "slurmrestd" else programs
    rest.cluster.users.make("eve")
    with pytest.raises(SlurmRefused, match="the user eve has no account there"):
        make(controller).submit(ticket(1, "eve"))
    with pytest.raises(SlurmRefused, match="over 24 h"):
        make(controller).submit(ticket(2, seconds=90_000))
    long = Holder(name="long", comment="{}", partition="gpu", cpus=1, megabytes=100,
                  gres="gpu:1", minutes=1441, user="ann")  # fmt: skip
    with pytest.raises(SlurmRefused, match=r"(?i)requested time limit is invalid"):
        controller.submit(long)
    with pytest.raises(SlurmRefused, match="Invalid job id specified"):
        controller.change(999_999, minutes=5)
    with pytest.raises(SlurmRefused, match="Invalid job id specified"):
        controller.hold([999_999])


@pytest.mark.parametrize("cut", ["before", "after"])
def test_a_submit_that_was_cut_off_is_neither_lost_nor_doubled(
    cut: str, make: Callable[[Controller], SlurmDelegate], rest: SlurmRest
) -> None:
    one, cable = ticket(1), Cable(rest.port, cut)
    with cable as url:
        delegate = make(rest.controller(url))
        with pytest.raises(SlurmUnavailable):
            delegate.submit(one)
        assert cable.cuts == 1

        def runs() -> tuple[str, ...]:
            """As the rounds of a hub do it."""
            delegate.turns()
            if delegate.is_missing(one):
                delegate.submit(one)
            return devices(delegate, one)

        assert wait_for(runs, "it to run", interval=0.5)
    assert len(rest.cluster.run("squeue", "-h", "-o", "%j").split()) == 1


def test_nobody_answers(make: Callable[[Controller], SlurmDelegate], rest: SlurmRest) -> None:
    """Without slurmrestd, or a controller behind it, nothing has ended."""
    cluster, one = rest.cluster, ticket(1)
    delegate = make(rest.controller(seconds=30))
    delegate.submit(one)
    wait_for(lambda: devices(delegate, one), "its device")
    rest.kill()
    with pytest.raises(SlurmUnavailable, match=r"slurmrestd at http.*Connection refused"):
        make(rest.controller()).turns()
    rest.start()
    assert wait_for(lambda: _devices_in_time(delegate, one), "slurmrestd's answer")
    cluster.save("ann")
    cluster.kill("slurmctld")
    other = make(rest.controller(seconds=30))
    with pytest.raises(SlurmUnavailable, match="the controller does not answer slurmrestd"):
        other.turns()
    with pytest.raises(SlurmUnavailable):
        other.submit(ticket(2))
    cluster.restart("slurmctld")
    assert wait_for(lambda: _devices_in_time(delegate, one), "the controller's answer")


def _devices_in_time(delegate: SlurmDelegate, ticket: Ticket) -> tuple[str, ...]:
    with suppress(SlurmUnavailable):
        return devices(delegate, ticket)
    return ()


def test_all_jobs_of_a_user_who_is_no_operator(rest: SlurmRest, tmp_path: Path) -> None:
    """What is held for a pause is released after it; places and points are refused, and nothing
    worse."""
    file, cluster = tmp_path / "cluster.yaml", rest.cluster
    file.write_text(yaml.safe_dump(described(cluster)), encoding="utf-8")
    rest.write_token(rest.token("bob"))
    try:
        delegate = SlurmDelegate(read_cluster(file), rest.controller(), as_member=False)
        running, one = [ticket(number) for number in range(3)], ticket(10, boost=2.5)
        for each in (*running, one):
            delegate.submit(each)
        wait_for(lambda: all(devices(delegate, each) for each in running), "three that run")
        assert set(cluster.run("squeue", "-h", "-o", "%u").split()) == {"bob"}

        def tended(reason: str, *, paused: bool) -> None:
            def look() -> bool:
                delegate.turns()
                delegate.tend([replace(one, position=1)], paused=paused)
                return told_of(cluster, one)["Reason"].startswith(reason)

            wait_for(look, f"{reason} to be why it waits", interval=0.5)

        tended("JobHeldUser", paused=True)
        tended("Resources", paused=False)
        delegate.cancel(running[0].id)
        wait_for(lambda: devices(delegate, one), "it to run")
    finally:
        rest.write_token()


def test_the_ways_to_it(rest: SlurmRest, tmp_path: Path) -> None:
    """A socket on this machine, and TLS: of the CA that we trust, and of another one."""
    controller = rest.controller()
    for user in ("", "ann"):
        assert replace(controller, url=f"unix://{rest.socket}").ping(user)[1]
    for name in ("ours", "other"):
        (tmp_path / name).mkdir()
        make_certificates(tmp_path / name, ["127.0.0.1"])
    with Cable(rest.port, tls=tmp_path / "ours") as url:
        ours = replace(controller, url=url, ca=str(tmp_path / "ours/ca.pem"))
        assert ours.ping()[1] and ours.longest("gpu") == 24 * 60
        for stranger in (str(tmp_path / "other/ca.pem"), ""):
            with pytest.raises(SlurmUnavailable, match="its certificate is not to be trusted"):
                replace(ours, ca=stranger).jobs()


def test_tokens(rest: SlurmRest) -> None:
    """One that has ended, is forged, or is no operator's; a new one needs no restart."""
    controller = rest.controller()
    settings = {"rest_url": rest.url, "rest_token_file": str(rest.token_file)}
    try:
        assert controller.ping()[0].startswith("22.05")
        found, states = check_rest(settings)
        assert [f.name for f in found if f.status is Status.FAIL] == []
        nodes = {node.name: {node.machine.gres: node.machine.files} for node in rest.cluster.nodes}
        assert {name: set(state.gpus) for name, state in states.items()} == {
            name: set(kinds) for name, kinds in nodes.items()
        }
        text = rest.token_file.read_text().strip()
        rest.write_token(text[:-6] + ("AAAAAA" if text[-6:] != "AAAAAA" else "BBBBBB"))
        with pytest.raises(SlurmUnavailable, match=r"not to the token in .*slurm\.token"):
            controller.jobs()
        assert [f.name for f in check_rest(settings)[0] if f.status is Status.FAIL] == [
            "controller"
        ]
        rest.write_token(rest.token(seconds=1))
        ended = "the token in .* ended on .* UTC. Put a new one there: scontrol token username="
        wait_for(lambda: controller.token().has_ended(), "the end of its time")
        with pytest.raises(SlurmUnavailable, match=ended):
            controller.jobs()
        assert check_rest(settings)[0][0].status is Status.FAIL
        rest.write_token(rest.token("bob"))
        assert '"jobs"' in controller.jobs(), "who asks may be anybody"
        assert [f.name for f in check_rest(settings)[0] if f.status is Status.FAIL] == [
            "members' jobs"
        ]
        settings["jobs_of_members"] = ""
        assert not [f for f in check_rest(settings)[0] if f.status is Status.FAIL]
    finally:
        rest.write_token()
    assert controller.ping()[1]


def test_a_machine_that_slurmrestd_cannot_close_gets_no_servers(
    make: Callable[[Controller], SlurmDelegate], rest: SlurmRest
) -> None:
    """Where a sick GPU is closed here and the programs are not there to tell Slurm."""
    nowhere = replace(rest.controller(), programs=Slurm(folder="/nonexistent"))
    delegate, sick = make(nowhere), rest.cluster.nodes[0]
    uuid = sick.engine.devices[0].uuid
    with pytest.raises(SlurmRefused, match=f"scontrol update NodeName={sick.name} State=DRAIN"):
        delegate.close(uuid, "a fan")
    assert delegate.keep_closed({uuid: "a fan"}) == []
    one, two = ticket(1), ticket(2)
    for each in (one, two):
        delegate.submit(each)
    wait_for(lambda: devices(delegate, one), "the other machine")
    assert devices(delegate, one) == (rest.cluster.nodes[1].engine.devices[0].uuid,)
    assert delegate.turns()[two.id].place == 1
    assert told_of(rest.cluster, two)["ExcNodeList"] == sick.name


def test_check(rest: SlurmRest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks slurmrestd, and neither munge nor Slurm's programs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(described(rest.cluster)), "utf-8")
    first, second = rest.cluster.nodes
    config = Config()
    config.JupyterHub.spawner_class = "gpuspawner.spawners.slurm.GPUSlurmSpawner"
    config.GPUSlurm.cluster_file = str(tmp_path / "cluster.yaml")
    config.GPUSlurm.rest_url = rest.url
    config.GPUSlurm.rest_token_file = str(rest.token_file)
    rest.cluster.run("scontrol", "update", f"nodename={second.name}", "state=drain", "reason=fan")
    findings = check_slurm(open_hub(config), None, read_cluster(tmp_path / "cluster.yaml"), False)
    found = {each.name: each for each in findings}
    assert "munge" not in found
    for name in ("controller", "members' jobs", f"node {first.name}"):
        assert found[name].status is Status.OK, found[name]
    assert "put the next one into" in found["token"].text, "it is good for an hour"
    closed = found[f"node {second.name}"]
    assert closed.status is Status.FAIL and "It is idle+drain (fan)" in closed.text


def without_slurm(folder: Path) -> str:
    """A PATH with all that this machine has, and the tests' environment, but Slurm's programs."""
    folder.mkdir()
    for place in (*map(Path, os.environ["PATH"].split(os.pathsep)[::-1]), BIN):
        for path in place.glob("*"):
            link = folder / path.name
            link.unlink(missing_ok=True)
            link.symlink_to(path)
    for name in ("sacct", "sacctmgr", "sbatch", "scancel", "scontrol", "sdiag", "sinfo", "squeue"):
        (folder / name).unlink(missing_ok=True)
    return str(folder)


def test_a_hub_without_slurm(hubs: None, rest: SlurmRest, tmp_path: Path) -> None:
    """A server on a node, from the click to its end, and back with the next one."""
    config = f"""
import os
os.environ["PATH"] = {without_slurm(tmp_path / "bin")!r}
os.environ.pop("SLURM_CONF", None)
c.GPUSlurm.rest_url = {rest.url!r}
c.GPUSlurm.rest_token_file = {str(rest.token_file)!r}
"""
    cluster = rest.cluster
    with SlurmHub(tmp_path / "hub", cluster, config) as hub:
        hub.ask("ann")
        lease = hub.wait_lease("ann")
        (container,) = hub.containers(hub.node_of(lease))
        assert container["State"] == "running"
        (job,) = cluster.run("squeue", "-h", "-o", "%u %T %j").splitlines()
        assert job == f"ann RUNNING gpuspawner-{lease.ticket_id}"
        rest.kill()
        rest.start()
        # Whole seconds, which is what Slurm knows of a job's end.
        get = hub.services.leases.get
        wait_for(lambda: get(lease.id).charged > 2 * MICRO, "two seconds' charge")
        hub.stop_server("ann")
        ended = hub.wait_end(lease)
        assert ended.state is LeaseState.ENDED and ended.charged > 0
        wait_for(lambda: not cluster.run("squeue", "-h", "-o", "%i"), "its job to end")
        assert "sacctmgr is not on this machine" in hub.log_text()
        assert "Traceback" not in hub.log_text()
