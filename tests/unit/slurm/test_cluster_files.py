"""Slurm's files from what hosts say they have, cluster.yaml as it is read, and edits that stay."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuspawner.cli.app import main
from gpuspawner.core.errors import ConfigError
from gpuspawner.devices.models import Device, DeviceStatus, Inventory
from gpuspawner.slurm.cluster import (
    GRES_TYPE,
    Cluster,
    Node,
    NodeDevice,
    cluster_of,
    gres_type,
    gres_types,
    read_cluster,
)
from gpuspawner.slurm.cluster_commands import HostInventory, node_devices, read_inventory
from gpuspawner.slurm.config import SlurmOptions, cluster_yaml, gres_conf, slurm_conf

A100, H100 = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"
GIB = 2**30


def host(name: str, *models: str, **more: Any) -> HostInventory:
    devices = tuple(
        NodeDevice(f"GPU-{name}-{i}", model, 80 * GIB, f"/dev/nvidia{i}")
        for i, model in enumerate(models)
    )
    usual: dict[str, Any] = {"cpus": 16, "memory_bytes": 64 * GIB, "slurm": "22.05.8"}
    return HostInventory(hostname=name, devices=devices, **(usual | {"engine": "26.1.5"} | more))


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., int]:
    """``gpuspawner slurm config`` for two hosts, in an empty folder."""
    for one in (host("gpu1", A100, H100, A100), host("gpu2", H100)):
        (tmp_path / f"{one.hostname}.json").write_text(one.to_json())
    hosts = [f"10.0.0.1{i}={tmp_path}/gpu{i}.json" for i in (1, 2)]

    def run(*words: str, hosts: list[str] = hosts) -> int:
        out = ["--out", str(tmp_path / "out"), "--controller", "head=10.0.0.1"]
        return main(["slurm", "config", *out, *words, *hosts])

    return run


@pytest.fixture
def refusal(
    config: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """What is said where nothing is written."""

    def run(*words: str) -> str:
        assert config(*words) == 2
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err

    return run


def nodes_of(conf: str) -> dict[str, dict[str, str]]:
    """The words of each line of a node."""
    lines = [line for line in conf.splitlines() if line.startswith("NodeName=")]
    told = [dict(word.split("=", 1) for word in line.split()) for line in lines]
    return {words["NodeName"]: words for words in told}


def test_generated_files_describe_the_hosts(config: Callable[..., int], tmp_path: Path) -> None:
    shards = ("--shards", "4", "--shards", "H100=0", "--shards", "gpu2/H100=2")
    assert config(*shards, "--name", "lab", "--set", "SlurmctldPort=7000") == 0
    out = tmp_path / "out"
    conf = (out / "slurm.conf").read_text()
    nodes = nodes_of(conf)
    assert nodes["gpu1"]["NodeAddr"] == "10.0.0.11"
    assert nodes["gpu1"]["Gres"] == "gpu:a100:2,gpu:h100:1,shard:a100:8"
    assert nodes["gpu2"]["Gres"] == "gpu:h100:1,shard:h100:2"
    assert int(nodes["gpu1"]["RealMemory"]) < 64 * 1024
    for line in ("ClusterName=lab", "SlurmctldHost=head(10.0.0.1)", "SlurmctldPort=7000"):
        assert line in conf.splitlines()
    assert "gres/gpu:a100,gres/gpu:h100,gres/shard,gres/shard:a100,gres/shard:h100" in conf
    # A shard that is asked for by its type has both of its weights.
    weights = "GRES/gpu=10000,GRES/shard=2500.00,GRES/shard:h100=2500.00"
    assert conf.splitlines()[-1].endswith(f" TRESBillingWeights={weights}")
    assert "ConstrainDevices=no" in (out / "cgroup.conf").read_text()
    assert (out / "slurmdbd.conf").stat().st_mode & 0o777 == 0o600

    # Slurm counts devices by their place in gres.conf, and so does cluster.yaml.
    gres = (out / "gres.conf").read_text()
    files = re.findall(r"NodeName=gpu1 Name=gpu Type=(\w+) File=(\S+)", gres)
    cluster = read_cluster(out / "cluster.yaml")
    first = cluster.node("gpu1")
    assert files == [("a100", "/dev/nvidia0"), ("a100", "/dev/nvidia2"), ("h100", "/dev/nvidia1")]
    assert [(d.gres, d.file) for d in first.devices] == files
    assert first.device_at(2).uuid == "GPU-gpu1-1"
    assert first.engine == "ssh://10.0.0.11"
    shared = re.findall(r"NodeName=(\w+) Name=shard Type=\w+ Count=(\d+) File=(\S+)", gres)
    assert shared == [
        ("gpu1", "4", "/dev/nvidia0"),
        ("gpu1", "4", "/dev/nvidia2"),
        ("gpu2", "2", "/dev/nvidia0"),
    ]
    assert [node.shards for node in cluster.nodes] == [{"a100": 4}, {"h100": 2}]
    assert [first.slots_of(device) for device in first.devices] == [4, 4, 1]
    assert cluster.hub_address == "10.0.0.1"


def test_controller_engine_uses_the_local_socket(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "head.json").write_text(host("head", A100).to_json())
    words = ["--out", str(tmp_path / "out"), f"head={tmp_path}/head.json"]
    assert main(["slurm", "config", *words, "--controller", "head=127.0.0.1"]) == 2
    assert "no other machine can reach" in capsys.readouterr().err
    assert main(["slurm", "config", *words, "--controller", "head=10.0.0.1"]) == 0
    node = read_cluster(tmp_path / "out/cluster.yaml").node("head")
    assert (node.engine, node.address) == ("unix:///var/run/docker.sock", "10.0.0.1")


def test_second_config_run_changes_nothing_and_keeps_edits(
    config: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert config() == 0
    path = tmp_path / "out/slurm.conf"
    before, stamp = path.read_text(), path.stat().st_mtime_ns
    capsys.readouterr()
    assert config() == 0
    assert "Nothing to do" in capsys.readouterr().out
    assert path.stat().st_mtime_ns == stamp

    assert config("--shards", "2", "--dry-run") == 0
    assert "+NodeName=gpu2 Name=shard" in capsys.readouterr().out
    assert path.read_text() == before

    path.write_text(before.replace("KillWait=10", "KillWait=77"))
    assert config("--shards", "2") == 1
    told = capsys.readouterr()
    assert "-KillWait=77" in told.out and "--force" in told.err
    assert "KillWait=77" in path.read_text()
    assert read_cluster(tmp_path / "out/cluster.yaml").most_shards == 1  # it was not written
    assert config("--shards", "2", "--force") == 0
    assert "KillWait=10" in path.read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--name", "My Lab"], "small letters"),
        (["--shards", "65"], "64 is the most"),
        (["--shards", "-1"], "write a number for all GPUs such as 4"),
        (["--shards", "A100=many"], "a model such as A100=4"),
        (["--shards", "gpu1/=4"], "such as gpu1/A100=4"),
        (["--shards", "T4=4"], "fits no GPU of these hosts. Their models are: NVIDIA A100-SXM4-80"),
        (["--shards", "gpu2/A100=4"], "fits no GPU of these hosts"),
        (["--hours", "0"], "write 1 to 8760"),
        (["--partition", "gpu;rm"], "letters, digits"),
        (["--engine", "tcp://{host}:2375"], "root"),
        (["--engine", "https://{host}:2376"], "tls"),
        (["--engine", "ssh://$(id)@{host}"], "ssh://USER@NODE"),
        (["--tls", "/nowhere"], "cannot be read"),
        (["--controller", "a b"], "is not a host"),
        (["--set", "Epilog"], "NAME=VALUE"),
        (["--set", "Epilog=/x\nNodeName=evil"], "NAME=VALUE"),
    ],
)
def test_invalid_config_option_is_named_and_nothing_written(
    refusal: Callable[..., str], words: list[str], said: str
) -> None:
    assert said in refusal(*words)


DEVICE = {"uuid": "GPU-9", "model": "x", "memory_bytes": GIB, "file": "/dev/nvidia0"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"slurm": "23.11.4"}, "22.05.8"),
        ({"hostname": "gpu1"}, "Two hosts are called gpu1"),
        ({"hostname": "x; reboot"}, "letters, digits and -"),
        ({"hostname": "x\nNodeName=evil"}, "letters, digits and -"),
        ({"layout": "Sockets=1 Gres=gpu:8"}, "as slurmd -C does"),
        ({"cpus": 0}, "1 is the least"),
        ({"memory_bytes": -1}, "1048576 is the least"),
        ({"unheard": 1}, "unknown key"),
        ({"devices": [DEVICE | {"uuid": "MIG-1234"}]}, "MIG"),
        ({"devices": [DEVICE | {"uuid": "GPU-gpu1-0"}]}, "already listed for the node gpu1"),
        ({"devices": [DEVICE | {"file": "/dev/nvidia0 Count=9"}]}, "whole path"),
        ({"devices": [DEVICE | {"model": "a\nb"}]}, "single line"),
    ],
)
def test_invalid_host_inventory_is_rejected(
    refusal: Callable[..., str], tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    path = tmp_path / "gpu2.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert said in refusal()


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The words that ``ssh`` was called with: a stand-in answers for the host 10.0.0.12."""
    bin, words = tmp_path / "bin", tmp_path / "words"
    bin.mkdir()
    (bin / "ssh").write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$@" > {words}\n'
        f'case "$*" in *10.0.0.12*) exec cat {tmp_path}/gpu2.json ;; esac\n'
        "echo 'ssh: connect to host: No route to host' >&2\nexit 255\n"
    )
    (bin / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin}:{os.environ['PATH']}")
    return words


def test_host_without_a_file_is_inventoried_over_ssh(
    config: Callable[..., int], tmp_path: Path, ssh: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert config(hosts=["10.0.0.12"]) == 0
    asked = ["--", "10.0.0.12", "gpuspawner", "slurm", "inventory"]
    assert ssh.read_text().splitlines()[-5:] == asked
    assert [node.name for node in read_cluster(tmp_path / "out/cluster.yaml").nodes] == ["gpu2"]

    assert config(hosts=["10.0.0.13"]) == 2
    told = capsys.readouterr().err
    assert "No route to host" in told and "10.0.0.13=FILE" in told
    ssh.unlink()
    assert config(hosts=["-oProxyCommand=id"]) == 2
    assert not ssh.exists()


@pytest.mark.parametrize("written", ["", "[]", "{", "<html>", "9" * 10_000, "[" * 100_000])
def test_unreadable_inventory_is_rejected_with_its_source(written: str) -> None:
    with pytest.raises(ConfigError, match="what gpu7 printed"):
        read_inventory(written, "what gpu7 printed")


GOOD = """
name: lab
nodes:
  gpu1:
    address: 10.0.0.11
    engine: ssh://gpuspawner@10.0.0.11
    cpus: 16
    memory: 64G
    devices:
      - {uuid: GPU-1111, model: NVIDIA A100-SXM4-80GB, memory: 80G}
"""


ENGINE = "ssh://gpuspawner@10.0.0.11"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("name: lab", "nam: lab", "line 2: the cluster has an unknown key 'nam'"),
        ("nodes:", "nodes: {}\nothers:", "unknown key"),
        ("gpu1:", "gpu 1:", "letters, digits and -"),
        ("10.0.0.11\n    engine", "gpu1\n    engine", "line 5.*not an IP address"),
        (ENGINE, "tcp://10.0.0.11:2375", "line 6.*root on the node"),
        (ENGINE, "http://10.0.0.11:2375", "root on the node"),
        (ENGINE, "https://10.0.0.11:2376", "needs 'tls'"),
        (ENGINE, "ssh://a:b@10.0.0.11", "ssh://USER@NODE"),
        (ENGINE, "ssh://-oProxyCommand=x", "ssh://USER@NODE"),
        (ENGINE, "unix://run/docker.sock", "unix:///var"),
        ("cpus: 16", "cpus: 0", "line 7"),
        ("cpus: 16", "cpus: 16\n    shards: {h100: 4}", "line 8.*'h100' to share: it has a100"),
        ("cpus: 16", "cpus: 16\n    shards: {A100: 4}", "small letters"),
        ("cpus: 16", "cpus: 16\n    shards: {a100: 65}", "64 is the most"),
        ("name: lab", "name: lab\nshards: 4", "line 3.*Write it as 'shards: {a100: 4}' in each"),
        ("cpus: 16", "cpus: 16\n    sampler: http://10.0.0.11:9401", "line 8.*without TLS"),
        ("cpus: 16", "cpus: 16\n    sampler: 10.0.0.11:9401", "line 8.*https://10.0.0.11:9401"),
        ("cpus: 16", "cpus: 16\n    sampler: https://a:b@10.0.0.11:9401", "line 8.*Write https"),
        ("cpus: 16", "cpus: 16\n    sampler: https://10.0.0.11:9401", "line 8.*also needs 'tls'"),
        ("GPU-1111", "'GPU 1'", "letters, digits and -"),
        ("memory: 80G", "memory: 80", "less than 1M"),
        ("memory: 80G", "memory: 80G, file: '/dev/x y'", "whole path"),
        ("memory: 80G", "memory: 80G, gres: 'a:9'", "small letters"),
        ("    devices:", "    devices:\n      - {uuid: GPU-1111, model: x, memory: 8G}", "already"),
    ],
)
def test_invalid_cluster_file_is_rejected_with_an_explanation(
    old: str, new: str, said: str
) -> None:
    assert cluster_of(GOOD).node("gpu1").device_at(0).gres == "a100"
    assert old in GOOD
    with pytest.raises(ConfigError, match=re.compile(f"cluster.yaml.*{said}", re.DOTALL)):
        cluster_of(GOOD.replace(old, new, 1))


def test_tls_files_must_exist_and_key_must_be_private(tmp_path: Path) -> None:
    tls = "\n    tls: {ca: ca.pem, certificate: cert.pem, key: key.pem}"
    written = GOOD.replace(ENGINE, f"https://10.0.0.11:2376{tls}")
    path = tmp_path / "cluster.yaml"
    path.write_text(written)
    for name in ("ca.pem", "cert.pem", "key.pem"):
        with pytest.raises(ConfigError, match=f"{name}, which cannot be read"):
            read_cluster(path)
        (tmp_path / name).write_text("x")
    (tmp_path / "key.pem").chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_cluster(path)
    (tmp_path / "key.pem").chmod(0o600)
    node = read_cluster(path).nodes[0]
    assert node.tls is not None and node.tls.key == str(tmp_path / "key.pem")
    assert cluster_of(cluster_yaml(replace(read_cluster(path)))).nodes[0] == node


def test_remote_sampler_needs_tls_and_local_one_does_not(
    config: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("ca.pem", "cert.pem", "key.pem"):
        (tmp_path / name).touch(mode=0o600)
    sampler = ["--sampler", "https://{host}:9401"]
    assert config(*sampler, "--controller", "gpu1=10.0.0.11") == 2
    assert "also needs 'tls'" in capsys.readouterr().err
    assert config(*sampler, "--controller", "gpu1=10.0.0.11", "--tls", str(tmp_path)) == 0
    nodes = read_cluster(tmp_path / "out/cluster.yaml").nodes
    assert [node.sampler for node in nodes] == ["http://127.0.0.1:9401", "https://10.0.0.12:9401"]
    assert cluster_of(cluster_yaml(read_cluster(tmp_path / "out/cluster.yaml"))).nodes == nodes


def test_unknown_cluster_nodes_and_devices_are_not_found() -> None:
    cluster = cluster_of(GOOD)
    assert cluster.device("GPU-2222") is None
    with pytest.raises(ConfigError, match="gpu9"):
        cluster.node("gpu9")
    for place in (1, -1):
        with pytest.raises(ConfigError, match=f"device {place} of the node gpu1"):
            cluster.nodes[0].device_at(place)


def test_gpu_models_get_distinct_gres_types() -> None:
    named = {
        "NVIDIA A100-SXM4-80GB": "a100",
        "NVIDIA GeForce RTX 4090": "rtx-4090",
        "Tesla T4": "t4",
        "NVIDIA TITAN V": "titan-v",
    }
    assert {model: gres_type(model) for model in named} == named
    two = gres_types(["NVIDIA A100-SXM4-80GB", "NVIDIA A100-PCIE-40GB", "Tesla T4"])
    assert sorted(two.values()) == ["a100-pcie-40gb", "a100-sxm4-80gb", "t4"]


@given(st.lists(st.text(min_size=1, max_size=120), max_size=6))
def test_every_gpu_model_gets_a_valid_unique_gres_type(models: list[str]) -> None:
    words = gres_types(models).values()
    assert all(re.fullmatch(GRES_TYPE, word) for word in words)
    assert len(set(words)) == len(set(models))


def test_cluster_file_of_an_older_version_without_shares_is_read() -> None:
    assert cluster_of(GOOD.replace("name: lab", "name: lab\nshards: 0")) == cluster_of(GOOD)


@given(st.integers(1, 4), st.integers(0, 4), st.sampled_from([0, 2, 8]))
def test_cluster_file_round_trips_and_matches_slurm_conf(
    hosts: int, devices: int, shards: int
) -> None:
    nodes = tuple(
        Node(
            name=f"n{n}",
            address=f"10.1.0.{n}",
            engine=f"ssh://10.1.0.{n}",
            cpus=n + 1,
            memory_bytes=(n + 1) * GIB,
            devices=tuple(
                NodeDevice(f"GPU-{n}-{d}", "A100", 80 * GIB, f"/dev/nvidia{d}", "a100")
                for d in range(devices)
            ),
            shards={"a100": shards} if shards and devices else {},
        )
        for n in range(hosts)
    )
    cluster = Cluster(name="lab", nodes=nodes)
    assert cluster_of(cluster_yaml(cluster)) == cluster
    assert gres_conf(cluster).count("Name=gpu ") == hosts * devices
    shared = hosts * devices if shards else 0
    assert len(re.findall(rf"Name=shard Type=\w+ Count={shards} ", gres_conf(cluster))) == shared
    told = nodes_of(slurm_conf(cluster, SlurmOptions(controller="head")))
    assert list(told) == [node.name for node in nodes]


def seen(*devices: Device) -> Inventory:
    return Inventory(devices=devices, observed_at=datetime.now(timezone.utc))


def test_device_files_follow_driver_minor_numbers(tmp_path: Path) -> None:
    devices = [
        Device(
            uuid=f"GPU-{i}", index=i, model="T4", memory_bytes=GIB, pci_bus_id=f"00000000:0{i}:0"
        )
        for i in range(3)
    ]
    for i, minor in enumerate((2, 0, 1)):
        folder = tmp_path / f"0000:0{i}:0"
        folder.mkdir()
        (folder / "information").write_text(f"Model: T4\nDevice Minor: \t {minor}\n")
    found = node_devices(seen(*devices), tmp_path)
    files = {"GPU-1": "/dev/nvidia0", "GPU-2": "/dev/nvidia1", "GPU-0": "/dev/nvidia2"}
    assert [(d.uuid, d.file) for d in found] == list(files.items())
    unknown = node_devices(seen(*devices), tmp_path / "no")
    assert [d.uuid for d in unknown] == ["GPU-0", "GPU-1", "GPU-2"]
    silent = replace(devices[1], status=DeviceStatus.UNKNOWN, reason="It fell off the bus.")
    with pytest.raises(ConfigError, match="GPU 1 is not responding: It fell off"):
        node_devices(seen(devices[0], silent), tmp_path)
