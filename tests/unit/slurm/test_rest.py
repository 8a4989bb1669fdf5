"""What slurmrestd is told, and what may be in the settings for it. Real: files."""

from __future__ import annotations

import base64
import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from gpuspawner.core.errors import ConfigError
from gpuspawner.slurm.programs import Holder
from gpuspawner.slurm.rest import Rest, job_submission, must_be_safe, read_token


def token(**claims: object) -> str:
    parts = [json.dumps({"alg": "HS256"}), json.dumps(claims), "signature"]
    return ".".join(base64.urlsafe_b64encode(part.encode()).decode().strip("=") for part in parts)


def written(folder: Path, text: str, mode: int = 0o600) -> str:
    path = folder / "slurm.token"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


FORM = "Write https://HOST:6820"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("https://head.example.org:6820", ""),
        ("https://10.0.0.1/", ""),
        ("http://127.0.0.1:6820", ""),
        ("http://[::1]:6820", ""),
        ("http://localhost", ""),
        ("unix:///run/slurmrestd.socket", ""),
        ("http://10.0.0.1:6820", "without TLS everybody on the network could read the token"),
        ("http://localhost.example.org", "without TLS"),
        ("http://127.0.0.1@evil.example:80", FORM),
        ("https://user@head", FORM),
        ("https://head/slurm", FORM),
        ("https://head:port", FORM),
        ("https://[head", FORM),
        ("unix://run/slurmrestd.socket", FORM),
        ("ftp://head", FORM),
        ("head:6820", FORM),
        ("https://head\n", FORM),
    ],
)
def test_addresses(url: str, said: str) -> None:
    if not said:
        must_be_safe(url)
        return
    with pytest.raises(ConfigError, match=said):
        must_be_safe(url)


def test_a_token(tmp_path: Path) -> None:
    """As ``scontrol token`` prints it, or without its name."""
    text = token(exp=1_900_000_000, iat=1, sun="slurm")
    for each in (f"SLURM_JWT={text}\n", text):
        found = read_token(written(tmp_path, each))
        assert (found.text, found.user) == (text, "slurm")
        assert found.ends_at == datetime(2030, 3, 17, 17, 46, 40, tzinfo=timezone.utc)
    assert read_token(written(tmp_path, token(sun="bob"))).ends_at is None
    assert read_token(written(tmp_path, token(sun="bob", exp=1))).has_ended()


@pytest.mark.parametrize(
    "text",
    ["", "hello", "a.b.c", "a.b", token(exp=5), token(sun="x\ny"), token(sun="x", exp="soon"),
     token(sun="x", exp=10**30), f"{token(sun='x')}\nX: y"],
)  # fmt: skip
def test_files_without_a_token(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"holds no token of Slurm's. Write there what scontrol"):
        read_token(written(tmp_path, text))


def test_files_with_tokens(tmp_path: Path) -> None:
    text = token(sun="slurm")
    for mode in (0o640, 0o604):
        path = written(tmp_path, text, mode)
        with pytest.raises(ConfigError, match=f"Others can read the token.*chmod 600 {path}"):
            Rest("https://head", path)
    good = written(tmp_path, text)
    cases: list[tuple[list[Any], str]] = [
        ([str(tmp_path / "none")], "cannot be read: No such file"),
        ([""], r"write c.GPUSlurm.rest_token_file"),
        ([good, str(tmp_path / "none.pem")], "rest_ca_file: there is no file"),
    ]
    for words, said in cases:
        with pytest.raises(ConfigError, match=said):
            Rest("https://head", *words)


def test_a_job() -> None:
    what: dict[str, Any] = {"name": "gpuspawner-1f", "comment": "{}", "partition": "gpu"}
    size: dict[str, Any] = {"cpus": 2, "megabytes": 900, "gres": "gpu:a100:2", "minutes": 80}
    who: dict[str, Any] = {"nice": -500, "account": "g-course", "user": "ann"}
    holder = Holder(excluded=("gpu1", "gpu2"), **what, **size, **who)
    told = job_submission(holder)["job"]
    assert (told["time_limit"], told["exclude_nodes"]) == (80, "gpu1,gpu2")
    assert told["no_requeue"] is True and told["account"] == "g-course"
    assert "nice" not in told, "its owner could not set it"
    assert not {"user", "user_id"} & told.keys(), "whose it is says who asks"
    assert set(told["environment"]) == {"LC_ALL", "PATH"}
