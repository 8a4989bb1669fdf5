"""The samplers of nodes as the hub asks them. Real: their processes, TLS, sockets, pynvml.
Stand-in: the driver's library. Those that lie are programs of the tests."""

from __future__ import annotations

import http.client
import json
import re
import signal
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gpuspawner.cli.app import main
from gpuspawner.cli.check_servers import check_clock
from gpuspawner.cli.check_slurm import check_sampler
from gpuspawner.engines.preflight import Status
from gpuspawner.monitoring.models import Sample
from gpuspawner.services import utcnow
from gpuspawner.slurm import telemetry
from gpuspawner.slurm.cluster import TLS, Cluster, Node, NodeDevice
from gpuspawner.slurm.sampler import MOST_BYTES, Recorder
from gpuspawner.slurm.telemetry import NodesSampler, seconds_ahead
from tests.support.clocks import apart
from tests.support.gate import Gate
from tests.support.in_step import InStep
from tests.support.node_sampler import NodeSampler
from tests.support.nvml import nvml_library as nvml
from tests.support.nvml.nvml_library import GIB, GPU, gpus
from tests.support.processes import free_port, wait_for
from tests.support.strange_sampler import Liar, telling
from tests.support.tls import make_certificates

pytestmark = pytest.mark.usefixtures("processes")

FLEET = gpus(3)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml.build_nvml_library(tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls") / "own"
    make_certificates(folder, ["127.0.0.1"])
    return folder


@pytest.fixture(scope="module")
def samplers(
    tmp_path_factory: pytest.TempPathFactory, library: Path, tls: Path
) -> Iterator[list[NodeSampler]]:
    """Two machines: one with two GPUs over TLS, one with one, which is the hub's own."""
    folder = tmp_path_factory.mktemp("nodes")
    one = NodeSampler(folder / "1", library, f"https://127.0.0.1:{free_port()}", "--tls", str(tls))
    two = NodeSampler(folder / "2", library, f"unix://{folder}/2/socket")
    with one, two:
        yield [one, two]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "SILENT_AFTER", 1.0)
    monkeypatch.setattr(telemetry, "SECONDS", 1.0)


def node(name: str, url: str, tls: Path | None, *fleet: GPU) -> Node:
    files = TLS(*(str(tls / f) for f in ("ca.pem", "cert.pem", "key.pem"))) if tls else None
    devices = tuple(NodeDevice(gpu.uuid, gpu.name, gpu.memory_bytes) for gpu in fleet)
    return Node(
        name=name, address="127.0.0.1", engine="ssh://x", tls=files, sampler=url, devices=devices
    )


@pytest.fixture
def nodes(samplers: list[NodeSampler], tls: Path) -> list[Node]:
    """As they are in cluster.yaml; every GPU works."""
    one, two = samplers
    one.show(*(replace(gpu, use=(50, 5), used_bytes=GIB) for gpu in FLEET[:2]))
    two.show(replace(FLEET[2], use=(70, 7), used_bytes=2 * GIB))
    return [node("gpu1", one.url, tls, *FLEET[:2]), node("gpu2", two.url, None, FLEET[2])]


@pytest.fixture
def asked(nodes: list[Node]) -> Asked:
    return Asked(*nodes)


class Asked:
    """The hub's part, and the newest sample of each device."""

    def __init__(self, *nodes: Node, **more: Any) -> None:
        self.sampler = NodesSampler(Cluster(name="lab", nodes=nodes), **more)
        self.newest: dict[str, Sample] = {}
        self.all: list[Sample] = []

    def look(self) -> None:
        found = self.sampler.sample(utcnow(), 0.0)
        assert list(found) == sorted(found, key=lambda sample: sample.at)
        self.all += found
        self.newest |= {sample.uuid: sample for sample in found}

    def until(self, what: str, is_so: Callable[[Mapping[str, Sample]], bool]) -> None:
        def look() -> bool:
            self.look()
            return len(self.newest) >= 1 and is_so(self.newest)

        try:
            wait_for(look, what, interval=0.2)
        except TimeoutError:
            pytest.fail(f"{what} did not come; last: {self.newest}")

    def use(self) -> list[int | None]:
        return [self.newest[gpu.uuid].use if gpu.uuid in self.newest else None for gpu in FLEET]


def test_samples_of_all_nodes_are_collected_once(asked: Asked, samplers: list[NodeSampler]) -> None:
    asked.until("a sample of each", lambda _: asked.use() == [50, 50, 70])
    assert {s.uuid: s.index for s in asked.newest.values()} == {
        gpu.uuid: index for index, gpu in enumerate(FLEET)
    }
    assert asked.newest[FLEET[2].uuid].used_bytes == 2 * GIB
    samplers[1].show(replace(FLEET[2], xids=[(1, 79)], fails={"nvmlDeviceGetMemoryInfo": 15}))
    asked.until("its error", lambda newest: bool(newest[FLEET[2].uuid].error))
    asked.look()
    assert [sample.xids for sample in asked.all if sample.xids] == [(79,)]
    moments = [sample.at for sample in asked.all if sample.uuid == FLEET[0].uuid]
    assert len(set(moments)) == len(moments), "none is told twice"


def test_dead_or_hanging_node_does_not_affect_others(
    asked: Asked, samplers: list[NodeSampler]
) -> None:
    asked.until("a sample of each", lambda _: asked.use() == [50, 50, 70])
    one = samplers[0]
    hang, go_on = (partial(one.send, number) for number in (signal.SIGSTOP, signal.SIGCONT))
    for end, back in ((one.kill, one.start), (hang, go_on)):
        end()
        try:
            asked.until("the silence", lambda _: asked.use() == [None, None, 70])
            silent = asked.newest[FLEET[0].uuid].silent
            assert silent.startswith("the machine gpu1 does not report the use of its GPUs: ")
            samplers[1].show(replace(FLEET[2], use=(80, 0)))
            asked.until("the other's next", lambda _: asked.use() == [None, None, 80])
            samplers[1].show(replace(FLEET[2], use=(70, 0)))
        finally:
            back()
        asked.until("all of them", lambda _: asked.use() == [50, 50, 70])
    errors = [sample.error for sample in asked.all if sample.uuid != FLEET[2].uuid]
    assert not any(errors), "silence is no fault of a GPU"


def test_samples_taken_while_unreachable_are_delivered_later(nodes: list[Node]) -> None:
    with Gate(nodes[1].sampler) as gate:
        asked = Asked(replace(nodes[1], sampler=gate.url))
        asked.until("a sample", lambda _: asked.use() == [None, None, 70])
        gate.shut()
        since = utcnow()
        asked.until("the silence", lambda newest: bool(newest[FLEET[2].uuid].silent))
        beside = Asked(nodes[1])  # who asks without the gate sees what is noted meanwhile
        beside.until(
            "samples", lambda _: sum(s.at > since and not s.silent for s in beside.all) >= 2
        )
        until = utcnow()
        gate.open()
        asked.until("what it tells", lambda _: asked.use() == [None, None, 70])
    seen = [sample.at for sample in asked.all if not sample.silent]
    assert [at for at in seen if since < at < until], "what was seen meanwhile"
    assert len(set(seen)) == len(seen), "and nothing twice"


def test_silence_of_a_node_that_is_off_is_no_fault(
    nodes: list[Node], caplog: pytest.LogCaptureFixture
) -> None:
    away = replace(nodes[1], sampler=f"http://127.0.0.1:{free_port()}")
    lost = replace(nodes[0], sampler=f"http://127.0.0.1:{free_port()}")
    some = Asked(away, lost, resting=lambda name: "off (power saving)" if name == "gpu2" else "")
    some.until(
        "the warning about the other and the rest of this one",
        lambda newest: "gpu1" in caplog.text and FLEET[2].uuid in newest,
    )
    assert some.newest[FLEET[2].uuid].resting
    assert some.newest[FLEET[2].uuid].silent == "the machine gpu2 is off (power saving)"
    assert "gpu2" not in caplog.text


def test_device_not_listed_by_its_node_is_reported(nodes: list[Node], tls: Path) -> None:
    strangers = [replace(FLEET[0], uuid=f"GPU-not-there-{n}") for n in range(2)]
    some = Asked(
        node("gpu1", nodes[0].sampler, tls, FLEET[0], strangers[0]),
        node("gpu2", nodes[1].sampler, None, strangers[1]),
    )
    reasons = ["", "the machine gpu1 does not list it", "the machine gpu2 does not list it"]
    asked_for = [gpu.uuid for gpu in (FLEET[0], *strangers)]
    some.until(
        "word of all",
        lambda newest: [newest[uuid].silent for uuid in asked_for if uuid in newest] == reasons,
    )


def test_sampler_and_hub_require_trusted_certificates(
    nodes: list[Node], asked: Asked, tls: Path, tmp_path: Path
) -> None:
    asked.until("a sample of each", lambda _: asked.use() == [50, 50, 70])
    port = int(nodes[0].sampler.rpartition(":")[2])
    context = ssl.create_default_context(cafile=str(tls / "ca.pem"))
    make_certificates(tmp_path / "other", ["127.0.0.1"])
    for pair in (None, tmp_path / "other", tls):
        if pair:
            context.load_cert_chain(pair / "cert.pem", pair / "key.pem")
        with closing(http.client.HTTPSConnection("127.0.0.1", port, context=context)) as client:
            if pair == tls:
                client.request("GET", "/samples")
                assert json.loads(client.getresponse().read())["version"] == 1
                continue
            with pytest.raises((OSError, http.client.HTTPException)):
                client.request("GET", "/samples")
                client.getresponse()
    plain = closing(http.client.HTTPConnection("127.0.0.1", port))
    with plain as client, pytest.raises((OSError, http.client.HTTPException)):
        client.request("GET", "/samples")
        client.getresponse()
    # The other way round: the hub trusts nobody but its own authority.
    believing = Asked(node("gpu1", nodes[0].sampler, tmp_path / "other", *FLEET[:2]))
    word = "certificate is not trusted"
    believing.until("the reason", lambda newest: all(word in s.silent for s in newest.values()))


LIES = {
    "nothing": (b"", "without response"),
    "no HTTP": (b"SSH-2.0-OpenSSH_9.2\r\n", "SSH-2.0"),
    "not found": (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "404"),
    "a page": (b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>", "not JSON"),
    "another": (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", "not a gpuspawner sampler"),
    "older": (b'HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n{"version":0}', "install the same"),
    "endless": (b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * (MOST_BYTES + 100_000), "longer than"),
}


def test_invalid_answer_of_a_node_affects_only_its_devices(
    nodes: list[Node], tmp_path: Path
) -> None:
    liars, cluster, why = [], [nodes[1]], {}
    lies = [
        *LIES.items(),
        ("dribbles", (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 99, "not answered")),
    ]
    for number, (name, (answer, said)) in enumerate(lies):
        gpu = replace(FLEET[0], uuid=f"GPU-of-a-liar-{number}")
        path = tmp_path / str(number)
        liars.append(Liar(path, answer, slow=name == "dribbles"))
        cluster.append(node(f"liar{number}", f"unix://{path}", None, gpu))
        why[gpu.uuid] = said
    some = Asked(*cluster)
    try:
        some.until("all of them", lambda newest: len(newest) == len(cluster))
        some.until(
            "the reasons",
            lambda newest: all(said in newest[uuid].silent for uuid, said in why.items()),
        )
        # Its sampler may have been started just now.
        some.until("the honest node", lambda newest: newest[FLEET[2].uuid].use == 70)
    finally:
        for liar in liars:
            liar.close()


class Scripted:
    """A driver that shows what it is told to."""

    use = 0

    def sample(self, now: datetime, monotonic: float) -> tuple[Sample, ...]:
        return (Sample(uuid=FLEET[0].uuid, index=0, at=now, use=self.use),)


def test_invalid_sample_is_skipped_and_others_are_kept(tmp_path: Path) -> None:
    driver = Scripted()
    recorder = Recorder(driver)
    url = f"unix://{tmp_path}/socket"
    with telling(recorder, url):
        some = Asked(node("gpu1", url, None, FLEET[0]))
        driver.use = 50
        recorder.look()
        some.until("the first", lambda _: some.use()[0] == 50)
        for driver.use in (4711, 60):
            recorder.look()
        some.until("what came after", lambda _: some.use()[0] == 60)
        assert [s.use for s in some.all if not s.silent] == [50, 60], "none is told twice"


def test_late_answer_is_dated_by_its_arrival(tmp_path: Path) -> None:
    """However long it then waits for whoever asks: else a later sample could seem the older one."""
    recorder, url = Recorder(Scripted()), f"unix://{tmp_path}/socket"
    recorder.look()
    with telling(recorder, url):
        some = Asked(node("gpu1", url, None, FLEET[0]))
        [source] = some.sampler._sources
        source.ask()
        assert source._done.wait(60)
        arrived = utcnow()
        time.sleep(0.1)
        some.look()
    [sample] = some.all
    assert sample.use == 0 and sample.at <= arrived


def test_node_with_a_wrong_clock_is_corrected_and_reported(
    library: Path, tls: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"https://127.0.0.1:{free_port()}"
    fleet = (replace(FLEET[0], use=(50, 5)),)
    shifted = NodeSampler(
        tmp_path / "node", library, url, "--tls", str(tls), fleet=fleet, around=apart(-3600)
    )
    with shifted:
        it = node("gpu1", url, tls, FLEET[0])
        some, began = Asked(it), utcnow()
        some.until("its samples", lambda _: sum(s.use == 50 for s in some.all) > 2)
        moments = [sample.at for sample in some.all if sample.use == 50]
        assert moments == sorted(moments)
        assert began - timedelta(seconds=60) < moments[0] < moments[-1] <= utcnow()
        ahead = wait_for(partial(seconds_ahead, it), "its time")
        assert abs(ahead + 3600) < 60
        finding = wait_for(partial(check_clock, it, None), "its time")
    assert finding.name == "clock gpu1" and finding.status is Status.FAIL
    said = re.fullmatch(r"Its clock is (\d+) s behind this machine's: munge .*", finding.text)
    assert said and abs(int(said[1]) - 3600) < 60 and "NTP" in finding.remedy
    (warned,) = (r.getMessage() for r in caplog.records if "clock" in r.getMessage())
    assert warned.startswith("the clock of the machine gpu1 is ") and "behind ours" in warned


def test_expired_certificate_is_named_as_the_reason(nodes: list[Node], tls: Path) -> None:
    """A node whose clock is far ahead gives the same reason."""
    files = (str(tls / name) for name in ("ca.pem", "expired-cert.pem", "expired-key.pem"))
    some = Asked(replace(nodes[0], tls=TLS(*files)))
    word = "rejects our certificate as expired"
    some.until("the reason", lambda newest: word in newest[FLEET[0].uuid].silent)


def test_clock_check_passes_for_synchronized_nodes(nodes: list[Node]) -> None:
    found = [wait_for(partial(check_clock, each, None), f"{each.name} to answer") for each in nodes]
    assert [each.status for each in found] == [Status.OK, Status.OK]
    gone = replace(nodes[0], sampler=f"https://127.0.0.1:{free_port()}")
    assert check_clock(gone, None) is check_clock(replace(gone, sampler=""), None) is None


def test_check_reports_sampler_problems(nodes: list[Node], tls: Path) -> None:
    def told() -> list[tuple[Status, str]]:
        return [(found.status, found.text) for found in map(check_sampler, nodes)]

    wait_for(lambda: all(status is Status.OK for status, _ in told()), "both to be well")
    other, said = replace(nodes[0], devices=nodes[1].devices), f"it does not list {FLEET[2].uuid}."
    wait_for(lambda: said in check_sampler(other).text, "word of the other")
    gone = replace(nodes[0], sampler=f"https://127.0.0.1:{free_port()}")
    assert check_sampler(gone).text == f"{gone.sampler}: Connection refused."
    assert "systemctl status gpuspawner-sampler" in check_sampler(gone).remedy


def test_invalid_sampler_arguments_are_explained(
    samplers: list[NodeSampler], tls: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = samplers[0].url
    for words, said in (
        (["http://10.0.0.1:9401"], "without TLS"),
        (["gpu2:9401"], "Write https://"),
        ([taken, "--tls", "/nowhere"], "/nowhere cannot be used: No such file"),
        ([taken, "--tls", str(tls)], "a free port"),
        (["unix:///nowhere/socket"], "cannot listen at unix:///nowhere/socket: No such file"),
        (["http://127.0.0.1:9401", "--processes", "1"], "30 to 86400"),
    ):
        assert main(["slurm", "sampler", "--listen", *words]) == 2
        assert said in capsys.readouterr().err


def test_program_in_step_with_a_node_is_seen_at_work_and_at_rest() -> None:
    device = InStep(0.05)
    Recorder(device, seconds=0.05).start()
    wait_for(device.is_over, "forty samples")
    assert {*device.uses} == {0, 100}
