"""What members bring: a full workspace, folders that they share, images of their own, and what they
leave in a container that is kept. Real: a hub with its service, its proxy, containers of a Docker
Engine, a registry of this test, directories of this machine, Chromium."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker.errors
import pytest
import requests
from playwright.sync_api import Browser, expect

from gpuspawner.services import Services
from gpuspawner.spawners import member_images
from tests.support.axe import troubles
from tests.support.brokers import make_services
from tests.support.browser import screenshot
from tests.support.engine import PrivateEngine
from tests.support.gpu_hub import CATALOG, GPUHub, message_of
from tests.support.hub import ADMIN
from tests.support.images import INSTANT, TRIED, ensure_images
from tests.support.page_text import text_of
from tests.support.pages import PHONE, WIDE, add_cookies, send_sign_in, sign_in
from tests.support.processes import BIN, free_port, system_path, wait_for
from tests.support.registry import SlowRegistry

CONFIG = """
c.GPUDockerSpawner.workspace = "{files}/members/{{username}}"
c.GPUDockerSpawner.workspace_quota = "5M"
c.Spawner.group_overrides = {{
    "large": {{"groups": ["large"], "spawner_override": {{"workspace_quota": "1G"}}}},
    "kept": {{"groups": ["kept"], "spawner_override": {{"remove": False}}}},
}}
c.JupyterHub.load_groups = {{
    "large": {{"users": ["lara"]}}, "lab": {{"users": ["anna"]}}, "kept": {{"users": ["kate"]}},
}}
c.JupyterHub.tornado_settings = {{"slow_spawn_timeout": 50}}  # who asks for an image hears of it
c.GPUDockerSpawner.own_images = {{
    "lab": {{"images": ["{repository}", "lab/*"], "most": "4G", "labels": {{"scanned": "yes"}}}},
}}
c.GPUFolders.source = "{files}/folders/{{id}}"
c.GPUFolders.archives = "{files}/archives"
c.Accounting.reconcile_seconds = 1
import gpuspawner.spawners.member_images
gpuspawner.spawners.member_images.MAX_LAYERS = 3
gpuspawner.add_services(c, url="http://127.0.0.1:{port}")
"""


HELD = """#!/bin/sh
while [ -e {hold} ]; do sleep 0.1; done
exec {tar} "$@"
"""
"""A ``tar`` that the hub finds first: it begins when the test lets it."""


class FilesHub(GPUHub):
    """A hub whose members' directories lie in ``files``."""

    files: Path
    hold: Path
    """While this file is there, nothing is archived."""
    services: Services

    def write(self, user: str, size: int) -> None:
        """As if a server of theirs had written a file of this many bytes."""
        (self.files / "members" / user).mkdir(parents=True, exist_ok=True)
        (self.files / "members" / user / "large").write_bytes(os.urandom(size))

    def rest(self, user: str, method: str, path: str = "", **body: Any) -> requests.Response:
        """The service's JSON for folders, with a token of this member."""
        sent = {"json": body} if method == "POST" else {}
        return self.call(user, method, f"folders{path}", **sent)


@pytest.fixture(scope="module")
def registry(engine: PrivateEngine) -> Iterator[SlowRegistry]:
    """Images of which one is scanned, and one is not."""
    ensure_images(engine, [INSTANT, TRIED])
    with SlowRegistry(size=1000) as registry:
        with tempfile.TemporaryFile() as saved:
            saved.writelines(engine.client.get_image(INSTANT))
            saved.seek(0)
            registry.add_saved("good", saved, {"Labels": {"scanned": "yes"}})
        with tempfile.TemporaryFile() as saved:
            saved.writelines(engine.client.get_image(TRIED))
            for tag in ("old", "new"):
                saved.seek(0)
                registry.add_saved(tag, saved, {"Labels": {"version": tag}})
        registry.add("bad", {"program": b"x"}, {"Labels": {"scanned": "no"}})
        registry.retag("lab", "old")
        yield registry


@pytest.fixture(scope="module")
def hub(
    hubs: None, engine: PrivateEngine, registry: SlowRegistry, folder: Path
) -> Iterator[FilesHub]:
    config = CONFIG.format(files=folder / "files", port=free_port(), repository=registry.repository)
    catalog = f"{CATALOG}  - slug: lab\n    image: {registry.repository}:lab\n"
    held, hold = folder / "programs" / "tar", folder / "hold"
    held.parent.mkdir()
    held.write_text(HELD.format(hold=hold, tar=shutil.which("tar")), encoding="utf-8")
    held.chmod(0o755)
    environment = {"PATH": system_path(held.parent, BIN)}
    with FilesHub(folder / "hub", engine, config, catalog=catalog, environment=environment) as hub:
        hub.files, hub.hold = folder / "files", hold
        hub.services = make_services(database_url=hub.database_url, folder_source="/nowhere/{id}")
        page = f"{hub.url}/services/gpu/static/gpu.css"
        wait_for(lambda: requests.get(page, timeout=60).ok, "the service's pages", timeout=60)
        for user in ("anna", "bert", "carl"):
            hub.browser_of(user)
        yield hub
        hub.services.store.close()
    engine.clean()
    shutil.rmtree(folder / "files", ignore_errors=True)
    for tag in ("good", "bad"):
        with contextlib.suppress(docker.errors.ImageNotFound):
            engine.client.remove_image(f"{registry.repository}:{tag}", force=True)


# A new workspace.


def test_first_sign_in_creates_the_workspace(hub: FilesHub) -> None:
    """The workspace is there before any server starts."""
    folder = hub.files / "members" / "dora"
    assert not folder.exists()
    assert "Welcome, dora" in hub.login("dora").get(hub.url, timeout=60).text
    wait_for(folder.is_dir, "the workspace")
    assert hub.server("dora") is None


# A full workspace.


def test_full_workspace_refuses_gpus_until_cleaned_up(hub: FilesHub) -> None:
    hub.write("anna", 6_000_000)
    before = hub.records()
    refused = hub.spawn("anna", {"gpus": 1})
    assert refused.status_code == 507
    assert message_of(refused) == (
        "Your files use 5.7 MB of 5.0 MB. To free space, start without a GPU and delete files."
    )
    assert hub.records() == before and hub.containers() == []
    form = text_of(hub.open_page("anna", "/hub/spawn").text)
    assert "Your files use 5.7 MB of 5.0 MB. To free space, start without a GPU" in form

    hub.spawn_and_wait("anna", {"gpus": 0})
    page = text_of(hub.open_page("anna", "/services/gpu/").text)
    assert "Your files use 5.7 MB of 5.0 MB. To free space, start without a GPU" in page
    page = text_of(hub.open_page("anna", "/services/gpu/folders").text)
    assert "5.7 MB of 5.0 MB are used. To free space, start without a GPU" in page
    assert hub.shell("anna", "cd /home/jovyan/work && rm large")[0] == 0
    hub.stop_server("anna")
    hub.spawn_and_wait("anna", {"gpus": 1})
    assert len(hub.open_leases("anna")[0].devices) == 1
    hub.stop_server("anna")
    assert "of 5.0 MB." in text_of(hub.open_page("anna", "/hub/spawn").text)


def test_group_quota_overrides_the_default(hub: FilesHub) -> None:
    hub.browser_of("lara")
    hub.write("lara", 6_000_000)
    assert "of 1.0 GB." in text_of(hub.open_page("lara", "/hub/spawn").text)
    hub.spawn_and_wait("lara", {"gpus": 1})
    hub.stop_server("lara")
    [known] = [some for some in hub.services.storage.workspaces() if some.user == "lara"]
    assert (known.source, known.quota) == (str(hub.files / "members" / "lara"), 2**30)


def test_server_cannot_start_on_a_claimed_workspace(hub: FilesHub) -> None:
    source = str(hub.files / "members" / "carl")
    hub.services.storage.use_workspace(source, "carl", None)
    hub.services.storage.claim_workspace(source, "an admin archives them")
    try:
        refused = hub.spawn("carl", {"gpus": 0})
        assert refused.status_code == 409
        assert message_of(refused) == (
            "Your files are not available right now: an admin archives them. Try again later, or "
            "ask your admin."
        )
        assert hub.containers() == [] and hub.open_leases("carl") == []
    finally:
        hub.services.storage.free_workspace(source)


def test_workspace_is_archived_and_restored_in_the_browser(hub: FilesHub, browser: Browser) -> None:
    """An admin archives what somebody left, and puts it back; a server refuses both."""
    hub.write("carl", 20_000_000)
    mine = hub.files / "members" / "carl"
    before = (mine / "large").read_bytes()
    hub.services.storage.use_workspace(str(mine), "carl", None)
    page = browser.new_context(viewport=WIDE).new_page()
    sign_in(page, hub, ADMIN, "workspaces?search=carl")
    carls = page.get_by_role("row").filter(
        has=page.get_by_role("rowheader", name="carl", exact=True)
    )

    # Carl starts a server while the question is on the screen.
    carls.get_by_role("button", name="Archive").click()
    expect(page.get_by_role("heading", name="Archive this workspace?")).to_be_visible()
    hub.spawn_and_wait("carl", {"gpus": 0})
    page.get_by_role("button", name="Archive it").click()
    expect(page.get_by_role("alert")).to_contain_text("belongs to carl, whose server runs")
    expect(carls.get_by_role("link", name="server runs")).to_be_visible()
    expect(carls.get_by_role("button", name="Archive")).to_have_count(0)
    hub.stop_server("carl")

    page.goto(f"{hub.url}/services/gpu/workspaces")
    carls.get_by_role("button", name="Archive").click()
    screenshot(page, "workspaces-archive")
    hub.hold.touch()
    page.get_by_role("button", name="Archive it").click()
    jobs = page.get_by_role("list").filter(has=page.locator("[data-job]"))
    expect(jobs).to_contain_text(str(mine))
    screenshot(page, "workspaces-archiving")
    hub.hold.unlink()
    expect(jobs).to_contain_text(f"{mine} is archived as carl-")
    assert "?" not in page.url, "the page loaded itself anew when it was done"
    expect(carls).to_contain_text("archived")
    assert troubles(page) == []
    screenshot(page, "workspaces-archived")
    page.reload()
    expect(jobs).to_contain_text("is archived as carl-")

    restore = page.get_by_role("button", name="Restore carl-")
    restore.click()
    expect(page.get_by_label("Into workspace")).to_have_value(str(mine))
    screenshot(page, "workspaces-restore")
    for left in mine.iterdir():
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    page.get_by_role("button", name="Restore it").click()
    expect(jobs).to_contain_text(f"is back in {mine} of carl")
    assert (mine / "large").read_bytes() == before
    done = [some.action for some in hub.services.audit.trail() if some.subject == str(mine)]
    assert done == ["restore workspace", "archive workspace"]

    phone = browser.new_context(viewport=PHONE, color_scheme="dark").new_page()
    sign_in(phone, hub, ADMIN, "workspaces")
    assert phone.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert troubles(phone) == []
    screenshot(phone, "workspaces-archived-phone")
    phone.get_by_role("button", name="Restore carl-").click()
    assert phone.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert troubles(phone) == []
    screenshot(phone, "workspaces-restore-phone")
    hub.write("carl", 0)


# Shared folders.


def test_shared_folder_is_mounted_for_invited_members(hub: FilesHub) -> None:
    made = hub.rest("anna", "POST", name="Daten für alle").json()
    place = hub.files / "folders" / made["id"]
    assert not place.exists()
    hub.spawn_and_wait("anna", {"gpus": 0})
    shared = "'/home/jovyan/shared/Daten für alle'"
    assert hub.shell("anna", f"echo hello > {shared}/note; ls -1 /home/jovyan/shared") == (
        0,
        "Daten für alle",
    )
    assert (place / "note").read_text() == "hello\n"

    offered = hub.rest("anna", "POST", f"/{made['id']}/invite", member="bert", write=False)
    assert offered.ok, offered.text
    [mine] = hub.rest("bert", "GET").json()["folders"]
    assert (mine["mounted_as"], mine["write"], mine["mine"]) == (None, False, False)
    hub.rest("bert", "POST", f"/{made['id']}/accept").raise_for_status()
    hub.spawn_and_wait("bert", {"gpus": 0})
    code, said = hub.shell("bert", f"cat {shared}/note; echo mine > {shared}/note")
    assert code != 0 and "hello" in said.splitlines() and "Read-only file system" in said
    hub.rest("anna", "POST", f"/{made['id']}/uninvite", member="bert").raise_for_status()
    hub.stop_server("bert")
    hub.spawn_and_wait("bert", {"gpus": 0})
    assert hub.shell("bert", "ls /home/jovyan/shared 2>/dev/null")[1] == ""
    for user in ("anna", "bert"):
        hub.stop_server(user)
    assert (place / "note").read_text() == "hello\n"


def test_unsafe_shared_folder_names_are_rejected(hub: FilesHub) -> None:
    before = [some.id for some in hub.services.shared_folders.all_folders()]
    for name in ("../../etc", "a:ro", "{username}", ""):
        refused = hub.rest("carl", "POST", name=name)
        assert (refused.status_code, refused.json()["error"]) == (400, "invalid_request")
        assert "'name'" in refused.json()["message"]
    assert [some.id for some in hub.services.shared_folders.all_folders()] == before


def test_stranger_cannot_detect_a_shared_folder(hub: FilesHub) -> None:
    made = hub.rest("anna", "POST", name="Private").json()
    for action, body in (
        ("accept", {}),
        ("leave", {}),
        ("invite", {"member": "carl", "write": True}),
        ("uninvite", {"member": "carl"}),
        ("hand-on", {"member": "carl"}),
        ("delete", {"name": "Private"}),
    ):
        answers = [
            hub.rest("carl", "POST", f"/{folder_id}/{action}", **body)
            for folder_id in (made["id"], "0" * 16)
        ]
        assert [answer.status_code for answer in answers] == [404, 404]
        assert (
            answers[0].json()["message"].replace(made["id"], "0" * 16)
            == (answers[1].json()["message"])
        )
    assert hub.rest("carl", "POST", f"/{made['id']}/restore").status_code == 403
    assert hub.rest("carl", "GET", "?all=1").status_code == 403
    assert made["id"] in {f["id"] for f in hub.rest(ADMIN, "GET", "?all=1").json()["folders"]}
    hub.rest("anna", "POST", f"/{made['id']}/delete", name="Private").raise_for_status()


def test_removed_user_loses_all_shared_folders(hub: FilesHub) -> None:
    hub.browser_of("dora")
    owned = hub.rest("dora", "POST", name="Dora's").json()
    given = hub.rest("anna", "POST", name="For Dora").json()
    hub.rest("anna", "POST", f"/{given['id']}/invite", member="dora", write=True)
    hub.rest("dora", "POST", f"/{given['id']}/accept").raise_for_status()
    hub.api("DELETE", "users/dora").raise_for_status()
    folders = hub.services.shared_folders
    wait_for(lambda: folders.folder(owned["id"]).left_at, "that Dora left", timeout=60)
    assert folders.folder(given["id"]).members == ()
    # Somebody else comes under the same name.
    hub.api("POST", "users/dora").raise_for_status()
    assert hub.rest("dora", "GET").json()["folders"] == []
    handed = hub.rest(ADMIN, "POST", f"/{owned['id']}/hand-on", member="anna")
    assert (handed.json()["owner"], handed.json()["owner_left_at"]) == ("anna", None)
    for some in (owned, given):
        hub.rest("anna", "POST", f"/{some['id']}/delete", name=some["name"]).raise_for_status()


def test_shared_folders_are_managed_in_the_browser(hub: FilesHub, browser: Browser) -> None:
    """Make, invite, accept, delete: in a browser without JavaScript, wide and on a phone."""
    anna = browser.new_context(viewport=WIDE, java_script_enabled=False).new_page()
    carl = browser.new_context(viewport=PHONE).new_page()
    anna.goto(f"{hub.url}/services/gpu/folders")
    send_sign_in(anna, "anna")  # on the way, by the form
    expect(anna.get_by_role("heading", name="Files", exact=True)).to_be_visible()
    sign_in(carl, hub, "carl", "folders")
    anna.get_by_label("Name", exact=True).fill("../up")
    anna.get_by_role("button", name="Create").click()
    expect(anna.get_by_role("alert")).to_contain_text("Nothing was changed.")
    anna.get_by_label("Name", exact=True).fill("Заметки <b>")
    anna.get_by_role("button", name="Create").click()
    expect(anna.get_by_role("alert")).to_contain_text("'<' may not be in it")
    anna.get_by_label("Name", exact=True).fill("Заметки")
    anna.get_by_role("button", name="Create").click()
    card = anna.get_by_role("article").filter(has_text="Заметки")
    card.get_by_label("Invite a member").fill("carl")
    card.get_by_label("They may").select_option("yes")
    card.get_by_role("button", name="Invite").click()
    expect(anna.get_by_text("They are invited.")).to_be_visible()

    carl.reload()
    expect(carl.get_by_text("anna shares it with you, to read and write.")).to_be_visible()
    assert troubles(carl) == []
    screenshot(carl, "folders-invited-phone")
    carl.get_by_role("button", name="Accept").click()
    expect(carl.get_by_text("~/shared/Заметки")).to_be_visible()
    assert carl.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    anna.reload()
    screenshot(anna, "folders-wide")
    card.get_by_text("Delete folder").click()
    card.get_by_label("Write its name").fill("Заметки")
    card.get_by_role("button", name="Delete").click()
    anna.get_by_role("button", name="Delete it").click()
    expect(anna.get_by_text("The folder is deleted.")).to_be_visible()
    carl.reload()
    expect(carl.get_by_text("None yet.")).to_be_visible()

    admin = browser.new_context(viewport=WIDE).new_page()
    sign_in(admin, hub, ADMIN, "folders")
    expect(admin.get_by_role("heading", name="Of others")).to_be_visible()
    assert troubles(admin) == []
    screenshot(admin, "folders-admin")


def test_image_is_updated_from_the_page_of_the_catalog(
    hub: FilesHub, engine: PrivateEngine, registry: SlowRegistry, browser: Browser
) -> None:
    """An admin looks for a newer image, sees from which to which, and it is tested and entered."""
    image = f"{registry.repository}:lab"
    old, new = (f"{image}@{registry.digest(tag)}" for tag in ("old", "new"))

    def is_here() -> bool:
        with contextlib.suppress(docker.errors.ImageNotFound):
            return bool(engine.client.inspect_image(image))
        return False

    wait_for(is_here, "the image, which the service pulls ahead", timeout=120)
    registry.retag("lab", "new")
    page = browser.new_context(viewport=WIDE).new_page()
    add_cookies(page, hub, ADMIN)
    page.goto(f"{hub.url}/hub/catalog")
    expect(page.get_by_role("link", name="Update")).to_have_count(0)
    page.get_by_role("button", name="Check for newer images").click()
    page.get_by_role("link", name="Update lab").click()
    expect(page.get_by_text(old, exact=True)).to_be_visible()
    expect(page.get_by_text(new, exact=True)).to_be_visible()
    assert troubles(page) == []
    screenshot(page, "catalog-update")
    field = page.get_by_label("To keep the current image as another environment")
    expect(field).to_have_value("lab-older")
    field.fill("instant")
    page.get_by_role("button", name="Keep it too").click()
    expect(page.get_by_role("alert")).to_contain_text("already has an environment 'instant'")
    assert troubles(page) == []
    screenshot(page, "catalog-update-taken")
    field.fill("lab-older")
    page.get_by_role("button", name="Keep it too").click()
    expect(page.get_by_text("stays as another environment, lab-older")).to_be_visible()
    assert troubles(page) == []
    screenshot(page, "catalog-update-keep")

    # What REST says of it, and that it is refused as on the page.
    offer = hub.call(ADMIN, "GET", "catalog/lab/update").json()
    assert (offer["image"], offer["offered"], offer["newer"]) == (old, new, True)
    assert hub.call(ADMIN, "GET", "catalog/updates").json()["updates"] == []
    digest = offer["digest"]
    for name, sent, status, sentence in (
        ("lab", {"digest": registry.digest("old")}, 409, "now offers another image"),
        ("lab", {"digest": digest, "keep_as": "A b"}, 400, "cannot be called 'A b'"),
        ("lab", {"digest": "newest"}, 400, "'digest'"),
        ("other", {"digest": digest}, 404, "There is no environment 'other'"),
    ):
        refused = hub.call(ADMIN, "POST", f"catalog/{name}/update", json=sent)
        assert (refused.status_code, sentence in refused.json()["message"]) == (status, True), (
            refused.text
        )
    assert hub.call(ADMIN, "GET", "catalog/updates").json()["updates"] == []
    page.get_by_role("button", name="Update it, and keep lab-older").click()
    updates = page.get_by_role("region", name="Updates")
    expect(updates).to_be_visible()
    screenshot(page, "catalog-updating")
    short = f"{image}@{registry.digest('new')[:19]}…"
    expect(updates).to_contain_text(f"lab has {short} now")
    expect(page.get_by_role("row", name="lab lab everybody")).to_contain_text(short)
    expect(page.get_by_role("columnheader", name="Tested")).to_be_in_viewport(ratio=1)
    assert troubles(page) == []
    screenshot(page, "catalog-updated")
    [entry] = [some for some in hub.services.audit.trail() if some.action == "update image"]
    assert (entry.actor, entry.subject) == (ADMIN, "environment lab")
    assert entry.detail == f"{old} to {new}, the old one kept as lab-older"
    expect(updates).to_contain_text("which lab-older keeps")
    expect(page.get_by_role("link", name="lab (older)")).to_be_visible()

    # By REST, back to the older one; the page shows it too.
    registry.retag("lab", "old")
    sent = {"digest": registry.digest("old")}
    begun = hub.call(ADMIN, "POST", "catalog/lab/update", json=sent)
    assert begun.ok and begun.json()["actor"] == ADMIN, begun.text

    def done() -> dict[str, Any] | None:
        told: dict[str, Any] = hub.call(ADMIN, "GET", "catalog/updates").json()["updates"][0]
        return told if told["id"] == begun.json()["id"] and told["ended_at"] else None

    ended = wait_for(done, "the update", timeout=120)
    assert (ended["state"], ended["error"], ended["offered"]) == ("done", "", old)
    page.reload()
    expect(updates.get_by_role("listitem")).to_have_count(2)
    assert hub.call(ADMIN, "GET", "catalog/lab/update").json()["newer"] is False

    phone = browser.new_context(viewport=PHONE, color_scheme="dark").new_page()
    add_cookies(phone, hub, ADMIN)
    for address in ("catalog", "catalog/lab/update"):
        phone.goto(f"{hub.url}/hub/{address}")
        assert phone.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        assert troubles(phone) == []
        screenshot(phone, f"{address}-phone")
    expect(phone.get_by_text("It has the newest image.")).to_be_visible()
    registry.retag("lab", "new")
    for address in ("catalog/lab/update?keep-as=lab", "catalog/lab/update?keep-as=lab-old"):
        phone.goto(f"{hub.url}/hub/{address}")
        assert phone.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        assert troubles(phone) == []
        screenshot(phone, f"{address.replace('?', '-')}-phone")


def test_only_admins_update_images_and_only_from_their_page(hub: FilesHub) -> None:
    before = (hub.folder / "catalog.yaml").read_bytes()
    assert hub.open_page("anna", "/hub/catalog/lab/update").status_code in (403, 404)
    assert hub.open_page("anna", "/hub/catalog/-/updates").status_code in (403, 404)
    for user, status in (("anna", (403, 404)), (ADMIN, (403,))):
        session = hub.browser_of(user)
        refused = session.post(f"{hub.url}/hub/catalog/lab/update?digest=sha256:0", timeout=60)
        assert refused.status_code in status, refused.text
    sent = {"digest": f"sha256:{'0' * 64}"}
    for method, path, body in (
        ("GET", "updates", {}),
        ("GET", "lab/update", {}),
        ("POST", "lab/update", {"json": sent}),
    ):
        assert hub.call("anna", method, f"catalog/{path}", **body).status_code == 403
    # The Hub answers the service alone, which says for whom it asks.
    headers = {"Authorization": f"token {hub.user_token(ADMIN)}"}
    for path in ("updates", "updates/lab?actor=admin"):
        url = f"{hub.url}/hub/api/gpuspawner/{path}"
        refused = requests.get(url, headers=headers, timeout=60)
        assert refused.status_code == 403, refused.text
    assert (hub.folder / "catalog.yaml").read_bytes() == before


# Images of their own.


def test_own_image_replaces_the_environment_image(hub: FilesHub, registry: SlowRegistry) -> None:
    own = f"{registry.repository}:good"
    assert hub.spawn("anna", {"environment": "instant", "gpus": 1, "own_image": own}).ok
    hub.wait_server("anna", timeout=90)
    [container] = hub.containers()
    assert container["Image"] == own
    assert container["Labels"]["gpuspawner.environment"] == "instant"
    assert len(hub.device_nodes("anna")) == 1
    hub.stop_server("anna")
    # The next start without it is the environment's own again.
    hub.spawn_and_wait("anna", {"environment": "instant", "gpus": 0})
    assert hub.containers()[0]["Image"] == INSTANT
    hub.stop_server("anna")


def test_missing_own_image_fails_before_any_lease(hub: FilesHub, registry: SlowRegistry) -> None:
    before = hub.records()
    refused = hub.spawn("anna", {"gpus": 1, "own_image": f"{registry.repository}:missing"})
    assert refused.status_code == 503
    assert message_of(refused).startswith(
        f"The image {registry.repository}:missing could not be pulled: "
    )
    assert hub.records() == before and hub.containers() == []


def test_unscanned_own_image_is_refused_and_removed(
    hub: FilesHub, engine: PrivateEngine, registry: SlowRegistry
) -> None:
    own = f"{registry.repository}:bad"
    refused = hub.spawn("anna", {"gpus": 1, "own_image": own})
    assert refused.status_code == 403
    assert message_of(refused) == (
        f"You may not use the image {own}: its label scanned is 'no', and has to be 'yes'."
    )
    with pytest.raises(docker.errors.ImageNotFound):
        engine.client.inspect_image(own)
    assert hub.open_leases() == [] and hub.containers() == []
    assert hub.balance("anna") <= 100_000_000


def test_disallowed_own_image_is_refused(hub: FilesHub) -> None:
    before = hub.records()
    for user, image, status, says in (
        ("anna", "other/tools:1", 403, "You may not use the image other/tools:1. Allowed images: "),
        ("bert", "lab/tools:1", 403, "You cannot use your own image"),
        ("anna", "lab/tools; rm -rf /", 400, "write an image as for docker pull"),
        ("anna", "../../etc", 400, "write an image as for docker pull"),
    ):
        refused = hub.spawn(user, {"gpus": 0, "own_image": image})
        assert (refused.status_code, says in message_of(refused)) == (status, True), image
    assert hub.records() == before
    assert 'name="own_image"' in hub.open_page("anna", "/hub/spawn").text
    assert 'name="own_image"' not in hub.open_page("bert", "/hub/spawn").text


# A container that is kept.


def test_kept_container_files_survive_the_next_starts(hub: FilesHub, engine: PrivateEngine) -> None:
    """``remove = False``: each stop keeps them in an image, which has three layers at most."""
    name, depths, tokens = "jupyter-kate", list[int](), list[str]()
    for turn, gpus in enumerate((1, 2, 0, 1, 1)):
        hub.spawn_and_wait("kate", {"gpus": gpus})
        container = engine.client.inspect_container(name)
        image = engine.client.inspect_image(container["Image"])
        depths.append(len(image["RootFS"]["Layers"]))
        assert container["Config"]["Labels"]["gpuspawner.lease"] == hub.open_leases("kate")[0].id
        assert not any(token in str(image["Config"]) for token in tokens), "an image keeps a token"
        assert not any(token in str(image) for token in tokens[:-1]), "and so does what it says"
        variables = dict(item.split("=", 1) for item in container["Config"]["Env"])
        tokens.append(variables["JUPYTERHUB_API_TOKEN"])
        said = hub.shell(
            "kate", f"cat /turns 2> /dev/null; ls /dev | grep -c nvidia[0-9]; echo {turn} >> /turns"
        )
        assert said[1].split()[-turn - 1 :] == [*map(str, range(turn)), str(gpus)]
        hub.stop_server("kate")
        waiting = engine.client.inspect_container(name)
        assert waiting["State"]["Status"] == "created"
        assert not waiting["HostConfig"]["DeviceRequests"], (
            "it waits with a GPU that it may not have"
        )
        variables = dict(item.split("=", 1) for item in waiting["Config"]["Env"])
        assert not variables["GPUSPAWNER_LEASE_ID"]
        assert variables["NVIDIA_VISIBLE_DEVICES"] == "void", "as in the image"
        assert not waiting["Config"]["Labels"]["gpuspawner.lease"]
    assert max(depths) <= max(depths[0], 3) + 1
    assert 1 in depths[1:], "it was never flattened"
    engine.client.remove_container(name)


def test_secret_variables_are_blanked_in_kept_images() -> None:
    environment = ["PATH=/bin", "JUPYTERHUB_API_TOKEN=abc", "MY_TOKEN=x", "GPUSPAWNER_RATE=1"]
    environment.append("NVIDIA_VISIBLE_DEVICES=GPU-1")
    assert member_images.without_secrets(environment, ["NVIDIA_VISIBLE_DEVICES=void"]) == [
        "PATH=/bin",
        "JUPYTERHUB_API_TOKEN=",
        "MY_TOKEN=",
        "GPUSPAWNER_RATE=",
        "NVIDIA_VISIBLE_DEVICES=void",
    ]
