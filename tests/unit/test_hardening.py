"""What a container gets where its admin said nothing. Real: the pure rules, on plain values."""

from __future__ import annotations

from typing import Any

import pytest

from gpuspawner.engines.injection import KEPT_CAPABILITIES, Hardening, dangers, harden

DOCKERS_OWN = {
    *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD"),
    *("NET_BIND_SERVICE", "NET_RAW", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"),
}
USUAL = Hardening(memory=2**30)


def test_an_admin_who_said_nothing() -> None:
    assert harden({"NetworkMode": "lab"}, USUAL) == {
        "NetworkMode": "lab",
        "CapDrop": ["ALL"],
        "CapAdd": list(KEPT_CAPABILITIES),
        "SecurityOpt": ["no-new-privileges"],
        "PidsLimit": 4096,
        "Memory": 2**30,
        "OomScoreAdj": 500,
    }
    assert set(KEPT_CAPABILITIES) < DOCKERS_OWN, "nothing that Docker does not give anyway"


def test_turned_off_it_changes_nothing() -> None:
    off = Hardening(capabilities=None, no_new_privileges=False, pids=0, memory=0, oom_score_adj=0)
    assert harden({"CapAdd": ["SYS_PTRACE"]}, off) == {"CapAdd": ["SYS_PTRACE"]}


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ({"CapDrop": ["NET_RAW"]}, {"CapDrop": ["NET_RAW"], "CapAdd": None}),
        (
            {"CapAdd": ["SYS_PTRACE", "CHOWN"]},
            {
                "CapDrop": ["ALL"],
                "CapAdd": ["SYS_PTRACE", *KEPT_CAPABILITIES[:1], "CHOWN", *KEPT_CAPABILITIES[2:]],
            },
        ),
        ({"SecurityOpt": ["seccomp=x"]}, {"SecurityOpt": ["seccomp=x", "no-new-privileges"]}),
        (
            {"SecurityOpt": ["no-new-privileges:false"]},
            {"SecurityOpt": ["no-new-privileges:false"]},
        ),
        ({"PidsLimit": 300}, {"PidsLimit": 300}),
        ({"PidsLimit": -1}, {"PidsLimit": -1}),
        ({"Memory": 5}, {"Memory": 5}),
        ({"OomScoreAdj": 7}, {"OomScoreAdj": 7}),
        (
            {"PidsLimit": 0, "Memory": 0, "OomScoreAdj": 0},
            {"PidsLimit": 0, "Memory": 0, "OomScoreAdj": 0},
        ),
        ({"Privileged": True}, {"CapDrop": None, "CapAdd": None, "SecurityOpt": None}),
    ],
)
def test_what_the_admin_said_counts(said: dict[str, Any], kept: dict[str, Any]) -> None:
    before = dict(said)
    hard = harden(said, USUAL)
    assert {key: sorted(v) if isinstance(v := hard.get(key), list) else v for key in kept} == {
        key: sorted(v) if isinstance(v, list) else v for key, v in kept.items()
    }
    assert said == before, "what goes in is left as it was"


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ({}, []),
        ({"Binds": ["/srv/docker.sock.d:/x:rw"], "NetworkMode": "lab"}, []),
        ({"Privileged": True}, ["privileged"]),
        ({"Binds": ["/var/run/docker.sock:/s:ro"]}, ["socket"]),
        ({"Mounts": [{"Source": "/run/containerd/containerd.sock"}]}, ["socket"]),
        ({"PidMode": "host", "NetworkMode": "host"}, ["PidMode", "NetworkMode"]),
    ],
)
def test_what_opens_the_machine_is_named(host: dict[str, Any], words: list[str]) -> None:
    found = dangers(host)
    assert len(found) == len(words)
    assert all(word in sentence for word, sentence in zip(words, found, strict=True))
