"""What outlives a restart of the service. Real: the accounting service as a process, SQLite, HTTP;
its Hub is a stand-in."""

from __future__ import annotations

import logging
import stat
from pathlib import Path

import pytest

from gpuspawner.web.app import NAME, read_cookie_secret, secret_file
from tests.support.hub import NAVIGATION
from tests.support.service_process import PREFIX, ServiceProcess

LOG = logging.getLogger("secret")


def test_a_form_that_is_open_during_a_restart_is_taken(processes: None, tmp_path: Path) -> None:
    with ServiceProcess(tmp_path) as service:
        ada = service.sign_in("ada")
        form = {"account": "member:ada", "_xsrf": ada.cookies.get("_xsrf", path=PREFIX)}
        service.stop()
        service.start()
        options = {"headers": NAVIGATION, "timeout": 60, "allow_redirects": False}
        sent = ada.post(f"{service.url}payer", data=form, **options)
        assert "This form is too old" not in sent.text
        assert sent.status_code in (302, 303), sent.text


def test_the_cookie_secret_is_kept_for_the_service_alone(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/gpu.sqlite"
    secret = read_cookie_secret(url, LOG)
    path = tmp_path / NAME
    assert secret_file(url) == path
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_cookie_secret(url, LOG) == secret and len(secret) == 32


@pytest.mark.parametrize("spoil", ["mode", "length", "link"])
def test_a_cookie_secret_that_cannot_be_trusted_is_not_used(tmp_path: Path, spoil: str) -> None:
    url = f"sqlite:///{tmp_path}/gpu.sqlite"
    secret = read_cookie_secret(url, LOG)
    path = tmp_path / NAME
    if spoil == "mode":
        path.chmod(0o644)
    elif spoil == "length":
        path.write_bytes(secret[:-1])
    else:
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    found = read_cookie_secret(url, LOG)
    assert found != secret and len(found) == 32
    if spoil != "link":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert read_cookie_secret(url, LOG) == found


def test_a_folder_that_cannot_be_written_to_costs_no_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"sqlite:///{tmp_path}/missing/gpu.sqlite"
    assert len(read_cookie_secret(url, LOG)) == 32
    assert "forms that are open at a restart will be refused" in caplog.text


def test_a_database_on_a_server_leaves_the_secret_in_the_working_directory() -> None:
    assert secret_file("postgresql://db/gpus") == Path(NAME)
    assert secret_file("sqlite://") == Path(NAME)
