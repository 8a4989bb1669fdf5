"""`gpuspawner init` on a machine's files. Real: files, templates, questions. Stand-in: programs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuspawner.cli.config import read_file
from gpuspawner.core.errors import Refused
from gpuspawner.install import commands, documents, files, rules
from gpuspawner.install.documents import example_files
from gpuspawner.install.host import OfflineHost
from gpuspawner.install.rules import PROXY, read_variables
from gpuspawner.install.sign_in import SIGN_INS
from tests.unit.install.machine import BIN, FakeHost, modes_below, run, texts_below

CONFIG = "/etc/gpuspawner/jupyterhub_config.py"
CATALOG = "/etc/gpuspawner/catalog.yaml"
ENVIRONMENT = "/etc/gpuspawner/environment"
CLIENT_SECRET = "/etc/gpuspawner/oauth_client_secret"
RECORD = "/etc/gpuspawner/.installed.json"
HUB_UNIT = "/etc/systemd/system/gpuspawner.service"
PROXY_UNIT = "/etc/systemd/system/gpuspawner-proxy.service"
MIG_UNIT = "/etc/systemd/system/gpuspawner-mig.service"
COMMAND = "/usr/local/bin/gpuspawner"
SECRET_VALUE = "a-secret-of-the-provider"


def options_of(auth: str) -> tuple[list[str], dict[str, str]]:
    """The options and variables that answer every question of a sign-in."""
    sign_in = SIGN_INS[auth]
    words = ["--defaults", "--auth", auth]
    words += ["--domain", "gpu.lab.example"] if sign_in.needs_domain else []
    for question in sign_in.questions:
        words += ["--set", f"{question.name}={question.example}"]
    numbered = enumerate(sign_in.secrets)
    return words, {secret.variable: SECRET_VALUE * 2 + f"{n}" for n, secret in numbered}


def init(root: Path, *more: str, auth: str = "shared-password", **kwargs: Any) -> Any:
    words, variables = options_of(auth)
    return run("init", "--prefix", str(root), *words, *more, **{**variables, **kwargs})


# A fresh machine.


def test_fresh_machine_gets_files_user_network_and_units(root: Path, host: FakeHost) -> None:
    done = run("init", "--prefix", str(root), "--defaults", "--domain", "gpu.lab.example")
    assert done.code == 0, done.output
    expected = {CONFIG, CATALOG, ENVIRONMENT, RECORD, HUB_UNIT, PROXY_UNIT, MIG_UNIT, COMMAND}
    assert texts_below(root).keys() == {*expected, "/etc/gpuspawner/nginx.conf"}
    private = {ENVIRONMENT, RECORD}
    for path, mode in modes_below(root).items():
        expected_mode = 0o600 if path in private else 0o755 if path == COMMAND else 0o644
        assert mode == expected_mode, path
    assert host.commands == [
        "useradd --system --groups docker gpuspawner",
        "install -d -m 700 -o gpuspawner -g gpuspawner /var/lib/gpuspawner",
        "docker network create --subnet 172.30.0.0/16 --gateway 172.30.0.1 "
        "-o com.docker.network.bridge.enable_icc=false gpuspawner",
        "systemctl daemon-reload",
        "systemctl enable --now gpuspawner-proxy.service",
        "systemctl enable --now gpuspawner.service",
    ]
    (command, environment, folder) = host.checks[0]
    assert command == [f"{BIN}/gpuspawner", "check", "-f", CONFIG]
    assert folder == "/var/lib/gpuspawner"
    variables = read_variables(texts_below(root)[ENVIRONMENT])
    assert {**variables, "PATH": f"{BIN}:/usr/local/bin:/usr/bin:/bin"} == environment
    assert len(variables["CONFIGPROXY_AUTH_TOKEN"]) == len(variables["JUPYTERHUB_CRYPT_KEY"]) == 64
    assert "server_name gpu.lab.example;" in texts_below(root)["/etc/gpuspawner/nginx.conf"]


def test_generated_passwords_are_private_and_long_enough(root: Path, host: FakeHost) -> None:
    done = run("init", "--prefix", str(root), "--defaults")
    variables = read_variables(texts_below(root)[ENVIRONMENT])
    member, admin = (variables[f"GPUSPAWNER_{who}_PASSWORD"] for who in ("MEMBER", "ADMIN"))
    assert len(member) >= 8 and len(admin) >= 32 and member != admin
    for value in variables.values():
        assert value not in done.output


def test_exit_code_is_that_of_the_check_and_a_red_hub_is_not_started(
    root: Path, host: FakeHost
) -> None:
    host.check_code = 1
    done = init(root)
    assert done.code == 1 and "was not started" in done.output
    assert host.active == {"gpuspawner-proxy.service"}

    # The next time, with nothing left to write, the hub is started.
    host.check_code = 0
    assert init(root).code == 0
    assert "gpuspawner.service" in host.active


def test_without_systemd_nothing_is_started(root: Path, host: FakeHost) -> None:
    host.machine = replace(host.machine, has_systemd=False)
    done = init(root)
    assert "systemctl enable --now gpuspawner-proxy gpuspawner" in done.output
    assert not any("systemctl" in command for command in host.commands)
    assert len(host.checks) == 1


def test_proxy_finds_node_where_systemd_does_not_look(root: Path, host: FakeHost) -> None:
    programs = {**host.machine.programs, "node": f"{BIN}/node"}
    host.machine = replace(host.machine, programs=programs)
    init(root)
    path = f"Environment=PATH={BIN}:/usr/local/bin:/usr/bin:/bin"
    assert path in texts_below(root)[PROXY_UNIT].splitlines()


def test_image_below_a_folder_is_written_without_programs(root: Path) -> None:
    done = init(root)
    assert done.code == 0
    assert texts_below(root).keys() >= {CONFIG, HUB_UNIT, MIG_UNIT, ENVIRONMENT}
    assert "No program was run" in done.output and "Made" not in done.output
    assert f"ExecStart={BIN}/jupyterhub -f {CONFIG}" in texts_below(root)[HUB_UNIT].splitlines()
    unit = texts_below(root)[MIG_UNIT].splitlines()
    assert f"ExecStart={BIN}/gpuspawner mig -f {CONFIG} restore" in unit
    assert "Nothing to change" in init(root).output


def test_image_is_completed_when_it_runs(
    root: Path, host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(commands, "open_host", OfflineHost)
        init(root, auth="github")
    before = texts_below(root)
    done = run("init", "--defaults", "--prefix", str(root))
    assert done.code == 0, done.output
    assert {path for path, text in texts_below(root).items() if text != before[path]} == {RECORD}
    assert [command.split()[0] for command in host.commands][:3] == ["useradd", "install", "docker"]
    assert host.active == {"gpuspawner-proxy.service", "gpuspawner.service"}


# Again.


def test_second_run_changes_nothing_and_says_so(root: Path, host: FakeHost) -> None:
    for auth in SIGN_INS:
        folder = root / auth
        folder.mkdir()
        host.root, host.networks, host.active = folder, {}, set()
        assert init(folder, "--admin", "ada", auth=auth).code == 0
        before = {path: (folder / path[1:]).stat() for path in texts_below(folder)}
        host.commands.clear()
        again = init(folder, "--admin", "ada", auth=auth)
        assert "Nothing to change" in again.output, again.output
        after = {path: (folder / path[1:]).stat() for path in texts_below(folder)}
        assert {p: (s.st_ino, s.st_mtime_ns) for p, s in before.items()} == {
            p: (s.st_ino, s.st_mtime_ns) for p, s in after.items()
        }
        assert host.commands == ["systemctl daemon-reload"]


def test_earlier_answers_and_secrets_are_remembered(root: Path, host: FakeHost) -> None:
    init(root, "--admin", "ada", auth="github")
    before = texts_below(root)
    done = run("init", "--prefix", str(root), "--defaults")
    assert "Nothing to change" in done.output and texts_below(root) == before


def test_changed_answer_restarts_the_hub_and_not_the_proxy(root: Path, host: FakeHost) -> None:
    init(root)
    host.commands.clear()
    done = init(root, "--admin", "grace")
    assert "Changed /etc/gpuspawner/jupyterhub_config.py." in done.output
    assert 'admin_users = {"grace"}' in texts_below(root)[CONFIG]
    assert host.commands == ["systemctl daemon-reload", "systemctl restart gpuspawner.service"]
    host.commands.clear()
    init(root, "--admin", "grace")
    assert host.commands == ["systemctl daemon-reload"]


def test_hub_is_restarted_when_the_check_is_green_again(root: Path, host: FakeHost) -> None:
    init(root)
    host.check_code = 1
    assert "goes on with its old configuration" in init(root, "--admin", "grace").output
    host.check_code = 0
    host.commands.clear()
    init(root, "--admin", "grace")
    assert "systemctl restart gpuspawner.service" in host.commands


def test_new_proxy_token_restarts_both(root: Path, host: FakeHost) -> None:
    init(root)
    file = root / ENVIRONMENT[1:]
    file.write_text(re.sub("CONFIGPROXY.*", "", file.read_text()))
    host.commands.clear()
    init(root)
    assert host.commands[1:] == [
        "systemctl restart gpuspawner-proxy.service",
        "systemctl restart gpuspawner.service",
    ]


def test_hub_that_would_not_start_at_boot_is_enabled(root: Path, host: FakeHost) -> None:
    init(root)
    host.enabled.remove("gpuspawner.service")
    host.commands.clear()
    done = init(root)
    assert host.commands[1:] == ["systemctl enable --now gpuspawner.service"]
    assert "Started the hub" not in done.output


# Differences.


def test_diff_shows_changes_without_secrets_and_writes_nothing(root: Path, host: FakeHost) -> None:
    first = init(root, "--diff", auth="oauth")
    assert first.code == 0 and texts_below(root) == {} and host.commands == []
    assert f"+++ {CONFIG}" in first.output and f"+++ {CLIENT_SECRET}" in first.output
    assert SECRET_VALUE not in first.output

    init(root, auth="oauth")
    before = texts_below(root)
    tokens = read_variables(before[ENVIRONMENT])
    variables = {"OAUTH_CLIENT_SECRET": "another-secret", "OAUTH_CLIENT_ID": "another-client"}
    done = init(root, "--diff", "--admin", "grace", auth="oauth", **variables)
    assert texts_below(root) == before
    assert '+c.Authenticator.admin_users = {"grace"}' in done.output.splitlines()
    assert f"--- {CLIENT_SECRET}" in done.output and "another-secret" not in done.output
    assert SECRET_VALUE not in done.output
    assert tokens["CONFIGPROXY_AUTH_TOKEN"] not in done.output


def test_diff_shows_that_a_secret_variable_changes(root: Path, host: FakeHost) -> None:
    init(root, auth="github")
    done = init(root, "--diff", auth="github", GITHUB_CLIENT_SECRET="another-secret")
    assert "+GITHUB_CLIENT_SECRET=*** (new)" in done.output.splitlines()
    assert "another-secret" not in done.output


def test_diff_hides_a_variable_that_was_taken_out(root: Path, host: FakeHost) -> None:
    init(root, auth="github")
    file = root / ENVIRONMENT[1:]
    file.write_text(file.read_text() + f"# the old one:\n#LDAP_PASSWORD={SECRET_VALUE}\nTZ=UTC\n")
    done = init(root, "--diff", "--database", "postgresql://gpuspawner@/gpuspawner", auth="github")
    assert "# the old one" in done.output and SECRET_VALUE not in done.output


def test_diff_of_an_installed_machine_is_empty(root: Path, host: FakeHost) -> None:
    init(root, auth="github")
    done = init(root, "--diff", auth="github")
    assert "---" not in done.output and "Nothing to change" in done.output


# Edited files.


def edit(root: Path, path: str) -> str:
    file = root / path[1:]
    file.write_text(file.read_text() + "# edited\n")
    return file.read_text()


def test_edited_file_stays_while_init_has_nothing_new_for_it(root: Path, host: FakeHost) -> None:
    init(root)
    edited = edit(root, CONFIG)
    done = init(root)
    assert done.code == 0 and f"Kept {CONFIG}, which was edited." in done.output
    assert "Nothing to change" in done.output
    assert texts_below(root)[CONFIG] == edited


def test_edited_file_is_refused_without_a_terminal(root: Path, host: FakeHost) -> None:
    init(root)
    edit(root, CONFIG)
    before = texts_below(root)
    done = init(root, "--admin", "grace")
    assert done.code == 1
    assert f"not written by it: {CONFIG}. Nothing was changed." in done.output
    assert texts_below(root) == before


def test_file_from_before_init_is_refused_too(root: Path, host: FakeHost) -> None:
    (root / "etc/gpuspawner").mkdir(parents=True)
    (root / CONFIG[1:]).write_text("c = get_config()\n")
    done = init(root)
    assert done.code == 1 and CONFIG in done.output
    assert texts_below(root) == {CONFIG: "c = get_config()\n"} and host.commands == []


def test_forced_replacement_keeps_the_edited_file(root: Path, host: FakeHost) -> None:
    init(root)
    edited = edit(root, CONFIG)
    assert init(root, "--admin", "grace", "--force").code == 0
    found = texts_below(root)
    assert 'admin_users = {"grace"}' in found[CONFIG] and "# edited" not in found[CONFIG]
    assert found[f"{CONFIG}.edited"] == edited

    second = edit(root, CONFIG)
    init(root, "--admin", "ada", "--force")
    assert texts_below(root)[f"{CONFIG}.edited-2"] == second
    assert modes_below(root)[f"{CONFIG}.edited-2"] == 0o644
    (root / CONFIG[1:]).chmod(0o600)  # there may be secrets in it
    edit(root, CONFIG)
    init(root, "--force")
    assert modes_below(root)[f"{CONFIG}.edited-3"] == 0o600
    assert texts_below(root)[f"{CONFIG}.edited"] == edited


@pytest.mark.parametrize(("answer", "replaced"), [("y", True), ("n", False), ("", False)])
def test_terminal_is_asked_before_an_edited_file_is_replaced(
    answer: str, replaced: bool, root: Path, host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    init(root)
    edited = edit(root, CONFIG)
    monkeypatch.setattr(commands, "is_terminal", lambda: True)
    # Sign-in and admins are given; the domain and the database are asked for.
    words = ["--auth", "shared-password", "--admin", "grace", "--domain", "gpu.lab.example"]
    words += ["--database", "sqlite"]
    done = run("init", "--prefix", str(root), *words, answers=f"{answer}\n")
    assert "was edited. Replace it" in done.output and "+c.Auth" in done.output
    assert (texts_below(root)[CONFIG] != edited) is replaced
    assert (f"{CONFIG}.edited" in texts_below(root)) is replaced


def test_own_variables_survive_and_are_never_refused(root: Path, host: FakeHost) -> None:
    init(root, auth="github")
    file = root / ENVIRONMENT[1:]
    file.write_text("# mine\nTZ=Europe/Berlin\n" + file.read_text())
    done = init(root, auth="github", GITHUB_CLIENT_SECRET='another secret with $ and "')
    assert done.code == 0
    text = file.read_text()
    assert text.startswith("# mine\nTZ=Europe/Berlin\n") and file.stat().st_mode & 0o777 == 0o600
    assert read_variables(text)["GITHUB_CLIENT_SECRET"] == 'another secret with $ and "'


def test_own_path_of_the_callback_is_kept_while_the_domain_is(root: Path, host: FakeHost) -> None:
    init(root, auth="github")
    file, own = root / ENVIRONMENT[1:], "https://gpu.lab.example/jupyter/hub/oauth_callback"
    file.write_text(re.sub("OAUTH_CALLBACK_URL=.*", f"OAUTH_CALLBACK_URL={own}", file.read_text()))
    init(root, auth="github")
    assert read_variables(file.read_text())["OAUTH_CALLBACK_URL"] == own
    init(root, "--domain", "new.lab.example", auth="github")
    new = "https://new.lab.example/hub/oauth_callback"
    assert read_variables(file.read_text())["OAUTH_CALLBACK_URL"] == new


def test_another_sign_in_does_not_inherit_ids_and_secrets(root: Path, host: FakeHost) -> None:
    init(root, auth="google")
    before = texts_below(root)
    words = ["--defaults", "--auth", "microsoft", "--set", "tenant=t", "--set", "allowed=a"]
    done = run("init", "--prefix", str(root), *words)
    assert done.code == 1 and "--set client_id=" in done.output
    assert "OAUTH_CLIENT_SECRET in this command's environment" in done.output
    assert texts_below(root) == before


def test_another_sign_in_does_not_inherit_admins(root: Path, host: FakeHost) -> None:
    init(root)
    assert json.loads(texts_below(root)[RECORD])["answers"]["admins"] == ["admin"]
    init(root, auth="google")
    assert "admin_users" not in texts_below(root)[CONFIG]
    assert "admin_users" not in texts_below(root)["/etc/gpuspawner/auth/google.py"]
    init(root, "--admin", "ada", auth="google")
    assert run("init", "--prefix", str(root), "--defaults").code == 0
    assert 'admin_users = {"ada"}' in texts_below(root)[CONFIG]


def test_another_sign_in_removes_variables_of_the_earlier_one(root: Path, host: FakeHost) -> None:
    init(root, auth="google")
    init(root, auth="ldap")
    names = read_variables(texts_below(root)[ENVIRONMENT]).keys()
    assert names == {"CONFIGPROXY_AUTH_TOKEN", "JUPYTERHUB_CRYPT_KEY", "LDAP_PASSWORD"}
    assert "LDAP_PASSWORD=" not in init(root, "--diff", auth="ldap").output
    init(root, auth="microsoft")
    names = read_variables(texts_below(root)[ENVIRONMENT]).keys()
    assert names >= {"OAUTH_CLIENT_ID", "OAUTH_CALLBACK_URL"} and "LDAP_PASSWORD" not in names


def test_catalog_is_written_once_and_then_left_to_its_editors(root: Path, host: FakeHost) -> None:
    init(root)
    edited = edit(root, CATALOG)
    assert "Nothing to change" in init(root).output
    assert texts_below(root)[CATALOG] == edited


def test_open_secrets_are_closed(root: Path, host: FakeHost) -> None:
    init(root, auth="oauth")
    (root / CLIENT_SECRET[1:]).chmod(0o644)
    done = init(root, auth="oauth")
    assert f"Closed {CLIENT_SECRET}" in done.output
    assert modes_below(root)[CLIENT_SECRET] == 0o600


# Secrets.


def test_secret_files_are_closed_before_anything_is_in_them(
    root: Path, host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def watched(descriptor: int, mode: int) -> None:
        found = os.fstat(descriptor)
        seen.append((mode, found.st_size, found.st_mode & 0o777))
        os_fchmod(descriptor, mode)

    os_fchmod = os.fchmod
    monkeypatch.setattr(files.os, "fchmod", watched)
    init(root, auth="oauth")
    assert {(0, 0o600)} == {(size, before) for _, size, before in seen} and len(seen) > 5
    assert modes_below(root)[CLIENT_SECRET] == modes_below(root)[ENVIRONMENT] == 0o600


def test_secrets_are_in_no_output_no_record_and_no_command(root: Path, host: FakeHost) -> None:
    for auth in ("oauth", "github", "ldap"):
        folder = root / auth
        folder.mkdir()
        host.root = folder
        done = init(folder, auth=auth)
        assert SECRET_VALUE not in done.output
        assert SECRET_VALUE not in texts_below(folder)[RECORD]
        place = CLIENT_SECRET if auth == "oauth" else ENVIRONMENT
        holders = {path for path, text in texts_below(folder).items() if SECRET_VALUE in text}
        assert holders == {place}
    assert not any(SECRET_VALUE in command for command in host.commands)
    assert not any(SECRET_VALUE in " ".join(command) for command, *_ in host.checks)


@pytest.mark.parametrize("mode", [0o757, 0o777])
def test_folder_that_others_can_write_is_refused(mode: int, root: Path, host: FakeHost) -> None:
    init(root)
    (root / "etc/gpuspawner").chmod(mode)
    before = texts_below(root)
    for words in (["init", "--defaults", "--admin", "grace"], ["uninstall", "--yes"]):
        done = run(*words, "--prefix", str(root))
        assert done.code == 1 and f"Not only root can write in {root}/etc/gpuspawner" in done.output
    assert texts_below(root) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a folder to another group")
@pytest.mark.parametrize(("group", "code"), [(50, 0), (12345, 1)])
def test_folder_below_usr_local_may_be_writable_for_debians_staff(
    group: int, code: int, root: Path, host: FakeHost
) -> None:
    folder = root / "usr/local/bin"
    folder.mkdir(parents=True)
    os.chown(folder, 0, group)
    folder.chmod(0o2775)
    done = init(root)
    assert done.code == code, done.output
    assert (COMMAND in texts_below(root)) is not bool(code)


def test_folder_of_another_user_is_refused(
    root: Path, host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    init(root)
    user = os.geteuid()
    if user == 0:
        os.chown(root / "etc/gpuspawner", 12345, 12345)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    done = init(root)
    assert done.code == 1 and "Not only root can write" in done.output


def test_links_of_an_image_do_not_lead_out_of_it(root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (root / "etc/systemd").mkdir(parents=True)
    (root / "etc/systemd/system").symlink_to(outside)
    done = init(root)
    assert done.code == 1 and f"leads out of {root}" in done.output
    assert list(outside.iterdir()) == [] and texts_below(root) == {}


def test_missing_secret_is_refused_by_name(root: Path, host: FakeHost) -> None:
    words, _ = options_of("github")
    done = run("init", "--prefix", str(root), *words)
    assert done.code == 1 and "GITHUB_CLIENT_SECRET in this command's environment" in done.output
    assert texts_below(root) == {}


def test_unusable_passwords_are_refused(root: Path, host: FakeHost) -> None:
    member, admin = "GPUSPAWNER_MEMBER_PASSWORD", "GPUSPAWNER_ADMIN_PASSWORD"
    done = init(root, **{member: "x" * 32, admin: "x" * 32})
    assert done.code == 1 and f"These have to differ: {member} and {admin}" in done.output
    done = init(root, **{admin: "x" * 31})
    assert done.code == 1 and "has at least 32 characters" in done.output
    done = init(root, **{member: "two\nlines of it"})
    assert done.code == 1 and f"{member} is not valid: it is not one line" in done.output
    assert texts_below(root) == {}


def test_typed_secret_is_not_echoed(
    root: Path, host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "is_terminal", lambda: True)
    words, _ = options_of("github")
    words.remove("--defaults")
    # The secret, admins, database.
    done = run("init", "--prefix", str(root), *words, answers=f"{SECRET_VALUE}\nada\n\n")
    assert done.code == 0, done.output
    assert SECRET_VALUE not in done.output
    assert read_variables(texts_below(root)[ENVIRONMENT])["GITHUB_CLIENT_SECRET"] == SECRET_VALUE


# Sign-ins.


def test_every_sign_in_makes_a_configuration_that_loads(
    root: Path, host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    classes = set()
    for auth, sign_in in SIGN_INS.items():
        folder = root / auth
        folder.mkdir()
        host.root = folder
        assert init(folder, "--admin", "ada", auth=auth).code == 0
        found = texts_below(folder)
        assert (f"/etc/gpuspawner/auth/{auth}.py" in found) is sign_in.in_file
        with monkeypatch.context() as patch:
            for name, value in read_variables(found[ENVIRONMENT]).items():
                patch.setenv(name, value)
            if auth == "oauth":
                patch.setenv("OAUTH_CLIENT_SECRET_FILE", str(folder / CLIENT_SECRET[1:]))
            config = read_file(folder / CONFIG[1:])
        classes.add(str(config.JupyterHub.authenticator_class))
        assert config.Authenticator.admin_users == {"ada"}
        if auth == "oauth":
            assert config.MemberOAuthenticator.client_secret == f"{SECRET_VALUE * 2}0"
        if auth == "google":
            assert config.MemberGoogleOAuthenticator.admin_users == {"ada"}
        if auth == "shared-password":
            own = config.MemberSharedPasswordAuthenticator
            assert own.user_password == f"{SECRET_VALUE * 2}0"
            assert own.admin_password == f"{SECRET_VALUE * 2}1"
        has_credential = "LoadCredential=" in found[HUB_UNIT]
        assert has_credential is (auth == "oauth") is (CLIENT_SECRET in found)
        callback = "https://gpu.lab.example/hub/oauth_callback"
        is_oauth = auth not in ("shared-password", "ldap", "lti")
        assert (
            read_variables(found[ENVIRONMENT]).get("OAUTH_CALLBACK_URL") == callback
        ) is is_oauth
    assert len(classes) == len(SIGN_INS)


HOSTILE = """x"}; import os; os.abort() #{{ 7 * 7 }} {% raw %} ' %s %h $HOME \\N{DIGIT ONE}\\"""


@pytest.mark.parametrize("auth", list(SIGN_INS))
def test_answers_cannot_leave_their_place_in_the_configuration(
    auth: str, root: Path, host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = [each.name for each in SIGN_INS[auth].questions if "url" not in each.name]
    questions = [name for name in questions if name != "issuer"]
    words = [word for name in questions for word in ("--set", f"{name}={HOSTILE}")]
    done = init(root, *words, "--admin", "x'}\"\\%s$HOME", auth=auth)
    assert done.code == 0, done.output
    found = texts_below(root)
    for name, value in read_variables(found[ENVIRONMENT]).items():
        monkeypatch.setenv(name, value)
    if auth == "oauth":
        monkeypatch.setenv("OAUTH_CLIENT_SECRET_FILE", str(root / CLIENT_SECRET[1:]))
    config = read_file(root / CONFIG[1:])
    assert config.Authenticator.admin_users == {"x'}\"\\%s$HOME"}
    in_python = {
        "oauth": lambda: config.MemberOAuthenticator.allowed_groups == {HOSTILE},
        "github": lambda: config.MemberGitHubOAuthenticator.allowed_organizations == {HOSTILE},
        "gitlab": lambda: config.MemberGitLabOAuthenticator.allowed_gitlab_groups == {HOSTILE},
        "google": lambda: config.MemberGoogleOAuthenticator.hosted_domain == [HOSTILE],
        "microsoft": lambda: HOSTILE in config.MemberMicrosoftOAuthenticator.group_names,
        "cilogon": lambda: HOSTILE in config.MemberCILogonOAuthenticator.idps,
        "ldap": lambda: config.MemberLDAPAuthenticator.user_search_base == HOSTILE,
        "lti": lambda: config.MemberLTI13Authenticator.client_id == {HOSTILE},
    }
    assert auth not in in_python or in_python[auth]()
    # Units and nginx get no answers but the domain and the addresses.
    for path in (HUB_UNIT, PROXY_UNIT, "/etc/gpuspawner/nginx.conf"):
        assert "abort" not in found.get(path, "")


def test_command_of_the_machine_runs_as_the_hubs_user(tmp_path: Path) -> None:
    """Real: Bash. Stand-ins, which print what they get: systemd-run, gpuspawner."""
    folder = tmp_path / "my bin;x"
    for name in ("systemd-run", "gpuspawner"):
        program = folder / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\nprintf '%s\\n' {name} \"$@\"\n")
        program.chmod(0o755)
    script = tmp_path / "command"
    script.write_text(documents._render("gpuspawner.sh", {"bin": str(folder)}))
    path = f"{folder}:{os.environ['PATH']}"

    def run_script(*arguments: str) -> list[str]:
        done = subprocess.run(
            ["bash", script, *arguments],
            env={"PATH": path, "SUDO_USER": "grace"},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.splitlines()

    words = ["queue", "move", "ada", "--reason", "a  'reason'; $HOME"]
    found = run_script(*words)
    assert found[0] == "systemd-run" and "--setenv=SUDO_USER=grace" in found
    assert {"User=gpuspawner", "WorkingDirectory=/var/lib/gpuspawner"} <= set(found)
    at = found.index(f"{folder}/gpuspawner")
    assert found[at + 1 :] == ["queue", "-f", CONFIG, *words[1:]]
    found = run_script("mig", "show")
    assert "User=root" in found and "StateDirectory=gpuspawner" not in found
    assert found[-4:] == ["mig", "-f", CONFIG, "show"]
    # What root does, and what is about no hub.
    for words in (["init", "--diff"], ["upgrade"], ["uninstall"], ["--version"], []):
        assert run_script(*words) == ["gpuspawner", *words]


def test_command_beside_other_programs_is_not_replaced(root: Path, host: FakeHost) -> None:
    programs = {**host.machine.programs, PROXY: f"/usr/local/bin/{PROXY}"}
    host.machine = replace(host.machine, bin_folder="/usr/local/bin", programs=programs)
    assert init(root).code == 0
    assert COMMAND not in texts_below(root)


def test_names_beyond_ascii_are_kept(root: Path, host: FakeHost) -> None:
    init(root, "--admin", "zoë😀", auth="ldap", LDAP_PASSWORD="pässwörd")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LDAP_PASSWORD", "x")
        config = read_file(root / CONFIG[1:])
    assert config.Authenticator.admin_users == {"zoë😀"}
    assert read_variables(texts_below(root)[ENVIRONMENT])["LDAP_PASSWORD"] == "pässwörd"


def test_questions_on_a_terminal_have_defaults(
    root: Path, host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "is_terminal", lambda: True)
    # Sign-in, domain (wrong, then right), both passwords, admins, database.
    typed = "\nhttps://gpu\ngpu.lab.example\n\n\n\n\n"
    done = run("init", "--prefix", str(root), answers=typed)
    assert done.code == 0, done.output
    assert "is not a domain name" in done.output
    record = json.loads(texts_below(root)[RECORD])["answers"]
    assert record["auth"] == "shared-password" and record["domain"] == "gpu.lab.example"
    assert record["admins"] == ["admin"]


# Databases and catalogs.


def test_postgresql_url_is_in_the_private_file_and_sqlite_removes_it(
    root: Path, host: FakeHost
) -> None:
    url = "postgresql://gpuspawner@db.lab.example/gpuspawner"
    init(root, "--database", url)
    assert read_variables(texts_below(root)[ENVIRONMENT])["GPUSPAWNER_DATABASE_URL"] == url
    assert "Nothing to change" in init(root).output, "it is remembered"
    init(root, "--database", "sqlite")
    assert "GPUSPAWNER_DATABASE_URL" not in texts_below(root)[ENVIRONMENT]


def test_database_password_comes_from_the_environment(root: Path, host: FakeHost) -> None:
    url = "postgresql://gpuspawner:hush@db.lab.example/gpuspawner"
    done = init(root, "--database", url)
    assert done.code == 2 and "GPUSPAWNER_DATABASE_URL in this command's environment" in done.output
    done = init(root, GPUSPAWNER_DATABASE_URL=url)
    assert done.code == 0 and "hush" not in done.output
    assert [path for path, text in texts_below(root).items() if "hush" in text] == [ENVIRONMENT]


def test_own_catalog_is_checked_and_installed(root: Path, host: FakeHost, tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("environments:\n  - slug: mine\n    display_name: Mine\n    image: mine:1\n")
    assert init(root, "--catalog", str(own)).code == 0
    assert texts_below(root)[CATALOG] == own.read_text()
    assert "Nothing to change" in init(root).output, "the next run needs no --catalog"
    assert texts_below(root)[CATALOG] == own.read_text()

    own.write_text("environments:\n  - slug: mine\n    image: 7\n")
    done = init(root, "--catalog", str(own))
    assert done.code == 2 and str(own) in done.output
    assert "display_name: Mine" in texts_below(root)[CATALOG]


def test_files_of_a_catalog_have_to_be_beside_it(
    root: Path, host: FakeHost, tmp_path: Path
) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(
        "environments:\n  - slug: mine\n    display_name: Mine\n    image: mine:1\n"
        "    packages: packages.txt\n"
    )
    (tmp_path / "packages.txt").write_text("torch==2.9\n")
    done = init(root, "--catalog", str(own))
    assert done.code == 1 and "copy them to /etc/gpuspawner first" in done.output
    (root / "etc/gpuspawner").mkdir(parents=True)
    shutil.copy(tmp_path / "packages.txt", root / "etc/gpuspawner")
    assert init(root, "--catalog", str(own)).code == 0


# What is missing.


def lacking(*programs: str) -> Callable[[FakeHost], None]:
    def change(host: FakeHost) -> None:
        found = {n: p for n, p in host.machine.programs.items() if n not in programs}
        host.machine = replace(host.machine, programs=found)

    return change


def with_facts(**facts: Any) -> Callable[[FakeHost], None]:
    def change(host: FakeHost) -> None:
        host.machine = replace(host.machine, **facts)

    return change


def not_root(host: FakeHost) -> None:
    host.is_root = False


def silent_engine(host: FakeHost) -> None:
    host.failing = "docker network ls"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (not_root, "You are not root: run this with sudo."),
        (lacking("docker"), "apt-get install docker.io"),
        (lacking("node"), "apt-get install --no-install-recommends nodejs npm"),
        (lacking(PROXY), "npm install --global --prefix /opt/gpuspawner"),
        (with_facts(groups=frozenset()), "There is no group docker"),
        (with_facts(ports_in_use=frozenset({8000})), "Port 8000, for the proxy, is in use"),
        (with_facts(bin_folder="/root/venv/bin"), "which services cannot read"),
        (with_facts(bin_folder="/srv/my hub/bin"), "characters that units cannot contain"),
        (with_facts(bin_folder="/srv/50%/bin"), "characters that units cannot contain"),
        (with_facts(bin_folder="/srv/$x/bin"), "characters that units cannot contain"),
        (with_facts(bin_folder="/srv/a\\b/bin"), "characters that units cannot contain"),
        (with_facts(bin_folder='/srv/"/bin'), "characters that units cannot contain"),
        (with_facts(bin_folder="/srv/a\nb/bin"), "characters that units cannot contain"),
        (silent_engine, "Docker is not responding"),
    ],
)
def test_missing_part_is_named_before_anything_is_written(
    change: Callable[[FakeHost], None], sentence: str, root: Path, host: FakeHost
) -> None:
    change(host)
    done = init(root)
    assert done.code == 1 and sentence in done.output, done.output
    assert texts_below(root) == {} and host.commands == []


def test_ports_of_a_running_hub_are_not_in_the_way(root: Path, host: FakeHost) -> None:
    init(root)
    host.machine = replace(host.machine, ports_in_use=frozenset({8000, 8001, 8081, 10190}))
    assert "Nothing to change" in init(root).output


@pytest.mark.parametrize(
    ("auth", "module", "command"),
    [
        ("ldap", "ldapauthenticator", "pip install 'gpuspawner[ldap]'"),
        ("lti", "ltiauthenticator", "pip install 'gpuspawner[lti]'"),
        ("shared-password", "psycopg", "pip install 'gpuspawner[postgres]'"),
    ],
)
def test_missing_python_package_is_named(
    auth: str, module: str, command: str, root: Path, host: FakeHost
) -> None:
    host.machine = replace(host.machine, missing_modules=frozenset({module}))
    database = ["--database", "postgresql://gpuspawner@/gpuspawner"] if module == "psycopg" else []
    done = init(root, *database, auth=auth)
    assert done.code == 1 and command in done.output


def test_provider_needs_a_domain(root: Path, host: FakeHost) -> None:
    words, variables = options_of("github")
    place = words.index("--domain")
    done = run("init", "--prefix", str(root), *words[:place], *words[place + 2 :], **variables)
    assert done.code == 1 and "give it with --domain" in done.output


def test_network_with_other_addresses_is_refused_or_used(root: Path, host: FakeHost) -> None:
    host.networks["gpuspawner"] = "172.31.0.0/16"
    done = init(root)
    assert done.code == 1 and "172.31.0.0/16, not 172.30.0.0/16" in done.output
    assert init(root, "--subnet", "172.31.0.0/16").code == 0
    found = texts_below(root)
    assert "http://172.31.0.1:8081" in found[CONFIG]
    assert "--error-target http://172.31.0.1:8081/hub/error" in found[PROXY_UNIT]
    assert not any("network create" in command for command in host.commands)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--domain", "https://gpu.lab.example"], "is not a domain name"),
        (["--domain", "gpu.lab.example:8000"], "is not a domain name"),
        (["--domain", "10.0.0.7"], "is not a domain name"),
        (["--domain", "-gpu.lab.example"], "is not a domain name"),
        (["--domain", "gpu"], "is not a domain name"),
        (["--domain", "gpu.lab.example;id"], "is not a domain name"),
        (["--domain", "gpu.lab.example\nroot /;"], "is not a domain name"),
        (["--domain", "$host.lab.example"], "is not a domain name"),
        (["--domain", "gpu.lab.example}"], "is not a domain name"),
        (["--auth", "kerberos"], "is not one of"),
        (["--database", "mysql://db/x"], "write sqlite, or a URL such as postgresql://"),
        (["--database", "sqlite:////srv/hub.sqlite"], "write sqlite, or a URL"),
        (["--admin", "ada lovelace"], "is not a user name"),
        (["--subnet", "8.8.8.0/24"], "is not a private network"),
        (["--subnet", "172.30.0.0/30"], "is not a private network"),
        (["--set", "allowed"], "is not of the form NAME=VALUE"),
        (["--prefix", "/does/not/exist"], "does not exist"),
    ],
)
def test_bad_options_are_usage_errors(
    words: list[str], sentence: str, root: Path, host: FakeHost
) -> None:
    done = run("init", "--prefix", str(root), "--defaults", *words)
    assert done.code == 2 and sentence in done.output, done.output
    assert texts_below(root) == {} and host.commands == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--set", "colour=blue"], "--set colour is no setting of the sign-in github"),
        (["--set", "allowed="], "The setting allowed is not valid: it is empty."),
    ],
)
def test_bad_settings_of_a_sign_in_are_refused(
    words: list[str], sentence: str, root: Path, host: FakeHost
) -> None:
    done = init(root, *words, auth="github")
    assert done.code == 1 and sentence in done.output
    done = init(root, "--set", "url=gitlab.lab.example", auth="gitlab")
    assert done.code == 1 and "is not an address" in done.output


# Interrupted.


class Killed(BaseException):
    """The process ends here."""


def test_killed_at_any_rename_leaves_each_file_old_or_new(
    root: Path, host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    init(root, auth="github")
    old = texts_below(root)
    change = ["--admin", "grace", "--subnet", "172.31.0.0/16", "--domain", "new.lab.example"]
    host.networks["gpuspawner"] = "172.31.0.0/16"
    reference = root.parent / "reference"
    shutil.copytree(root, reference)
    assert init(reference, *change, auth="github").code == 0
    new = texts_below(reference)
    assert sum(old[path] != new[path] for path in old) >= 5
    assert not [path for path in new if path not in old]

    renames = kills = 0
    really = os.replace

    def killed_at(limit: int) -> Callable[[Any, Any], None]:
        def rename(source: Any, target: Any) -> None:
            nonlocal renames
            renames += 1
            if renames == limit:
                raise Killed
            really(source, target)

        return rename

    for limit in range(1, 20):
        for path, text in old.items():
            (root / path[1:]).write_text(text)
        renames = 0
        with monkeypatch.context() as patch:
            patch.setattr(files.os, "replace", killed_at(limit))
            try:
                init(root, *change, auth="github")
            except Killed:
                kills += 1
            else:
                break
        found = texts_below(root)
        assert found.keys() == old.keys(), "nothing half-written is left"
        for path in found.keys() - {RECORD}:
            assert found[path] in (old[path], new[path]), path
        assert modes_below(root)[ENVIRONMENT] == 0o600
        # The next run goes on where this one ended, and takes nothing for an edit.
        done = init(root, *change, auth="github")
        assert done.code == 0 and "edited" not in done.output, done.output
        assert {p: t for p, t in texts_below(root).items() if p != RECORD} == {
            p: t for p, t in new.items() if p != RECORD
        }
    assert kills >= 6


def test_killed_run_is_continued_with_other_answers_too(
    root: Path, host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    init(root)
    really = os.replace

    def rename(source: Any, target: Any) -> None:
        really(source, target)
        if Path(target).name == "jupyterhub_config.py":
            raise Killed  # this file is written, and nothing says so yet

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "replace", rename)
        with pytest.raises(Killed):
            init(root, "--admin", "grace")
    assert 'admin_users = {"grace"}' in texts_below(root)[CONFIG]
    done = init(root, "--admin", "linus")
    assert done.code == 0 and 'admin_users = {"linus"}' in texts_below(root)[CONFIG]
    assert f"{CONFIG}.edited" not in texts_below(root)


def test_hub_can_read_its_files_whatever_the_umask_is(root: Path, host: FakeHost) -> None:
    before = os.umask(0o077)
    try:
        init(root, auth="github")
    finally:
        os.umask(before)
    modes = {path: path.stat().st_mode & 0o777 for path in root.rglob("*") if path.is_dir()}
    modes.pop(root / "var/lib/gpuspawner")
    assert modes.pop(root / "etc/gpuspawner/auth") == 0o755
    assert {mode for path, mode in modes.items() if "etc" in path.parts} == {0o755}
    assert modes_below(root)["/etc/gpuspawner/auth/github.py"] == 0o644


def test_rest_of_a_killed_process_is_replaced(root: Path, host: FakeHost) -> None:
    rest = root / "etc/gpuspawner/.environment.gpuspawner-new"
    rest.parent.mkdir(parents=True)
    rest.write_text("half of")
    rest.chmod(0o644)
    assert init(root).code == 0
    assert not rest.exists() and modes_below(root)[ENVIRONMENT] == 0o600
    assert "half of" not in texts_below(root)[ENVIRONMENT]


@pytest.mark.parametrize("failing", ["useradd", "install -d", "network create"])
def test_failed_program_is_named_and_the_next_run_completes(
    failing: str, root: Path, host: FakeHost
) -> None:
    host.failing = failing
    done = init(root)
    assert done.code == 1 and "This command failed (1): " in done.output
    assert failing in done.output and "it failed" in done.output
    host.failing = ""
    assert init(root).code == 0
    assert "Nothing to change" in init(root).output


def test_full_disk_leaves_the_old_file_and_no_rest(
    root: Path, host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    init(root)
    before = texts_below(root)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", full)
        done = init(root, "--admin", "grace")
    assert done.code == 1 and "No space left on device" in done.output
    assert texts_below(root) == before


def test_damaged_record_is_explained(root: Path, host: FakeHost) -> None:
    init(root)
    (root / RECORD[1:]).write_text("{")
    done = init(root)
    assert done.code == 1 and f"{root}{RECORD} is damaged" in done.output


# Rules and texts.


def test_hub_config_is_what_the_templates_make() -> None:
    """Else change both: the templates in gpuspawner/install, and the files in hub_config."""
    from tests.support.processes import REPO

    found = example_files()
    assert len(found) == 13
    for name, text in found.items():
        assert (REPO / "hub_config" / name).read_text(encoding="utf-8") == text, name
    assert {path.stem for path in (REPO / "hub_config/auth").glob("*.py")} == {
        each.name for each in SIGN_INS.values() if each.in_file
    }


@pytest.mark.parametrize(
    "value", ["plain", "with space", 'a"b', "a\\b", "$HOME `id`", "it's", "ü", "#x"]
)
def test_variables_are_read_as_they_were_written(value: str) -> None:
    text = rules.merge_variables("A=1\n# note\nB='two words'\n", {"X": value, "A": "2"})
    assert read_variables(text) == {"A": "2", "B": "two words", "X": value}
    assert text.startswith("A=2\n# note\nB='two words'\n")
    assert rules.merge_variables(text, {"X": value, "A": "2"}) == text
    assert read_variables(rules.merge_variables(text, {}, ("X", "B"))) == {"A": "2"}


@pytest.mark.parametrize(
    ("text", "expected"),  # what load_env_file of systemd 252 returns
    [
        ("A = b\n", {"A": "b"}),
        ("A=  x  \n", {"A": "x"}),
        ("A=b # c\n", {"A": "b # c"}),
        ("A='x' \n", {"A": "x"}),
        ("A=a\\\nb\n", {"A": "ab"}),
        ('A="x\ny\\\nz"\nB=1\n', {"A": "x\nyz", "B": "1"}),
        ('A=a"b"c\n', {"A": 'a"b"c'}),
        ("A='it'\"s\"\n", {"A": "its"}),
        ('A="a\\qb"\n', {"A": "a\\qb"}),
        ("A=a\\qb\n", {"A": "aqb"}),
        ("; A=1\n# a\\\nB=1\nC=$x\n", {"C": "$x"}),
        ("A=1\nA=2\n", {"A": "2"}),
        ("A='a\\'b'\n", {"A": "a\\b'"}),
        ("A=x\x0bB=2\nC=\n", {"A": "x\x0bB=2", "C": ""}),
    ],
)
def test_environment_file_is_read_as_systemd_does(text: str, expected: dict[str, str]) -> None:
    assert read_variables(text) == expected
    assert rules.merge_variables(text, expected) == (text if text != "A=1\nA=2\n" else "A=2\n")
    assert read_variables(rules.merge_variables(text, {"A": "new"}))["A"] == "new"
    assert "A" not in read_variables(rules.merge_variables(text, {}, ["A"]))


def test_diff_hides_values_of_several_lines(root: Path, host: FakeHost) -> None:
    init(root)
    file = root / ENVIRONMENT[1:]
    file.write_text(file.read_text() + "KEY='first\nc2Vjb25k=\n'\nOTHER=one\\\nc2Vjb25k=\n")
    done = init(root, "--diff", "--database", "postgresql://gpuspawner@/gpuspawner")
    assert "KEY=***" in done.output and "c2Vjb25k" not in done.output


@pytest.mark.parametrize(
    "value", ["plain", "with space", 'a"b', "a\\b", "$HOME `id`", "it's", "50%h", "#x", "\\", "a;b"]
)
def test_variables_are_quoted_as_a_shell_and_systemd_read_them(value: str, tmp_path: Path) -> None:
    file = tmp_path / "environment"
    file.write_text(rules.merge_variables("", {"X": value}))
    script = f'. {file}; printf %s "$X"'
    assert subprocess.run(["sh", "-c", script], stdout=subprocess.PIPE).stdout.decode() == value


TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue
   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000
   1: 0100007F:1F91 00000000:0000 0A 00000000:00000000
   2: 0100007F:27CE 0100007F:1F41 01 00000000:00000000
   3: 0200007F:1F41 00000000:0000 0A 00000000:00000000
"""
TABLE6 = "   0: 00000000000000000000000000000000:{:04X} 00000000:0000 0A 00000000:00000000\n"


def test_only_listeners_at_our_own_addresses_are_in_the_way() -> None:
    assert rules.ports_in_use([TABLE, ""], "172.30.0.1") == {8000}
    at_gateway = TABLE.replace("0100007F:1F91", "01001EAC:1F91")
    assert rules.ports_in_use([at_gateway], "172.30.0.1") == {8000, 8081}
    assert rules.ports_in_use([TABLE6.format(8081), TABLE6.format(22)], "172.30.0.1") == {8081}


def test_line_breaks_cannot_enter_a_file() -> None:
    with pytest.raises(ValueError, match="not one line"):
        rules.check_line("one\nTWO=2")


def test_record_with_unreadable_config_folder_is_refused(root: Path) -> None:
    tree = files.FileTree(root)
    (root / "etc").mkdir()
    (root / "etc/gpuspawner").write_text("a file")
    with pytest.raises(Refused, match="cannot be read"):
        tree.load_record()
