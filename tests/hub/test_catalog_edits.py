"""A catalog that changes under a running hub. Real: hub, proxy, service, SQLite; local servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from textwrap import dedent

import jsonschema
import pytest
import requests

from gpuspawner.leases.models import ServerRef
from gpuspawner.notifications.models import NoticeKind
from tests.support.gpu_hub import assert_in_words
from tests.support.hub import ADMIN, NAVIGATION
from tests.support.lines import CONFIG, fill, line_up
from tests.support.paying_hub import PayingHub
from tests.support.processes import environment_of, wait_for

SOON = 60.0

CATALOG = """
    environments:
      - slug: one
        display_name: Number one
        image: none
        default: true
        environment: {SIZE: usual, KEPT: yes it is}
        profile_options:
          size:
            choices:
              usual: {default: true}
              large: {environment: {SIZE: large}}
      - {slug: two, display_name: Number two, image: none}
      - {slug: needy, image: none, cpu_variant: false}
"""


class CatalogHub(PayingHub):
    """A hub and its catalog's file."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.file = folder / "catalog.yaml"
        self.write(CATALOG)
        super().__init__(folder, f'{CONFIG}\nc.GPULocalSpawner.catalog = "{self.file}"\n')
        self.session = cache(self.login)

    def write(self, text: str) -> None:
        """Save the file as an editor does."""
        new = self.file.with_suffix(".new")
        new.write_text(dedent(text), encoding="utf-8")
        new.replace(self.file)

    def form(self, user: str) -> str:
        answer = self.session(user).get(
            f"{self.url}/hub/spawn/{user}", headers=NAVIGATION, timeout=SOON
        )
        assert answer.status_code == 200, answer.text
        return answer.text


@pytest.fixture(scope="module")
def hub(hubs: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CatalogHub]:
    with CatalogHub(tmp_path_factory.mktemp("catalog") / "hub") as hub:
        yield hub


def wild() -> str:
    """Markup in every text that a catalog may hold."""
    bad = '<script>alert("{0}")</script><img src=x onerror=alert("{0}")>'
    keys = ("display_name", "summary", "description", "maintainer")
    lines = [f"{key}: '{bad.format(key)}'" for key in keys]
    lines += [f"frameworks: {{'{bad.format('framework')}': '{bad.format('version')}'}}"]
    lines += [f"links: {{'{bad.format('link')}': 'https://example.org/?<script>alert(1)'}}"]
    lines += [f"allowed_groups: ['{bad.format('group')}']", "packages: wild.txt"]
    lines += ["changes: wild.md", "sample_notebook: wild.ipynb"]
    option = f"{{display_name: '{bad.format('option')}', choices: {{x: {{display_name: "
    lines += [f"profile_options: {{o: {option}'{bad.format('choice')}'}}}}}}}}"]
    body = "".join(f"        {line}\n" for line in lines)
    return f"{CATALOG}      - slug: wild\n        image: none\n{body}"


@pytest.fixture(autouse=True)
def as_it_was(hub: CatalogHub) -> Iterator[None]:
    hub.write(CATALOG)
    yield
    for ticket in hub.broker.waiting():
        hub.stop_server(ticket.server.user)
    for lease in hub.broker.open_leases():
        hub.stop_server(lease.server.user)


def message(answer: requests.Response) -> str:
    assert 400 <= answer.status_code < 500, answer.text
    said = str(answer.json()["message"])
    assert_in_words(said)
    return said


def test_an_edit_counts_without_a_restart(hub: CatalogHub) -> None:
    assert "Number two" in hub.form("ada")
    hub.write(CATALOG.replace("Number two", "Second to none"))
    assert "Second to none" in hub.form("ada")
    assert "Number two" not in hub.form("ada")
    hub.write(CATALOG + "      - {slug: new, image: none}\n")
    lease = hub.start_server("ada", environment="new", gpus=0)
    assert lease.environment == "new"


def test_a_broken_edit_is_for_admins_and_changes_nothing(hub: CatalogHub) -> None:
    assert "Number two" in hub.form("ada")
    hub.write(CATALOG + "      - {slug: new, image: none, colour: red}\n")
    told = f"{hub.file}, line 15: environment &#39;new&#39; has an unknown key &#39;colour&#39;"
    shown = hub.form(ADMIN)
    assert told in shown
    assert "Only admins see this" in shown
    member = hub.form("ada")
    assert "Number two" in member
    assert "colour" not in member and str(hub.file) not in member
    assert hub.start_server("ada", environment="two", gpus=0).environment == "two"
    logged = "The catalog is not right; the last good one stays. "
    assert hub.log_text().count(logged + told.replace("&#39;", "'")) == 1
    hub.write(CATALOG)
    assert "Only admins see this" not in hub.form(ADMIN)


def test_an_environment_that_is_gone_ends_the_wait_for_it_in_words(hub: CatalogHub) -> None:
    fill(hub, "bob", "cleo", "dan")
    (ticket,) = line_up(hub, "eve", environment="two")
    hub.write(CATALOG.replace("slug: two", "slug: too"))
    ended = wait_for(
        lambda: found if (found := hub.broker.ticket(ticket.id)).outcome else None,
        "the end of the wait",
        timeout=SOON,
    )
    why = "There is no environment 'two' on this hub. Did you mean 'too'?"
    assert (ended.outcome, ended.end_reason) == ("refused", why)
    assert hub.broker.lease_of(ServerRef("eve")) is None
    (notice,) = hub.broker.notifications.notices_of("eve")
    assert notice.kind is NoticeKind.TICKET_ENDED and why.rstrip("?") in notice.body


def test_an_edit_of_what_an_environment_needs_costs_nobody_their_place(hub: CatalogHub) -> None:
    fill(hub, "bob", "cleo", "dan")
    (ticket,) = line_up(hub, "ned", environment="two")
    needs = "slug: two, min_driver: '550.54', min_cuda: '12.4'"
    hub.write(CATALOG.replace("slug: two", needs).replace("Number two", "Second to none"))
    assert "Second to none" in hub.form("ada")
    hub.stop_server("bob")
    hub.wait_server("ned")
    assert hub.broker.ticket(ticket.id).outcome == "granted"


def test_an_environment_that_is_gone_and_was_had_last_time(hub: CatalogHub) -> None:
    hub.start_server("fay", environment="two", gpus=0)
    hub.stop_server("fay")
    hub.write(CATALOG.replace("slug: two", "slug: 'off'"))
    again = hub.api("POST", "users/fay/server")  # with what was chosen last time
    assert message(again).startswith("There is no environment 'two' on this hub. Choose one of:")
    assert 'value="one"' in hub.form("fay")
    assert hub.start_server("fay", environment="one", gpus=0).environment == "one"


def test_choices_within_an_environment_reach_the_server(hub: CatalogHub) -> None:
    def variables(user: str) -> dict[str, str]:
        seen = map(environment_of, hub.children_left())
        return next(each for each in seen if each.get("JUPYTERHUB_USER") == user)

    hub.start_server("gil", environment="one", gpus=0)
    hub.start_server("hal", environment="one", gpus=0, options=["one.size=large", "two.x=y"])
    assert (variables("gil")["SIZE"], variables("hal")["SIZE"]) == ("usual", "large")
    assert variables("hal")["KEPT"] == "yes it is"
    assert 'value="one.size=large"' in hub.form("kay")
    chosen = {"environment": "one", "gpus": "0", "options": ["one.size=large"]}
    hub.post_form(hub.session("kay"), "/hub/spawn/kay", chosen)
    hub.wait_server("kay")
    assert variables("kay")["SIZE"] == "large"
    wrong = hub.spawn("ida", {"environment": "one", "options": {"size": "huge"}})
    assert message(wrong) == "Number one has no 'huge' for 'size'. Choose one of: usual, large."
    wrong = hub.spawn("ida", {"environment": "two", "options": {"size": "large"}})
    assert message(wrong) == "Number two has no option 'size'. It has none."
    wrong = hub.spawn("ida", {"environment": "one", "options": {"size": "../x"}})
    assert "must hold texts such as 'memory=large'" in message(wrong)


def test_an_environment_may_need_a_gpu(hub: CatalogHub) -> None:
    refused = hub.spawn("jon", {"environment": "needy", "gpus": 0})
    assert message(refused) == "needy does not run without a GPU. Ask for 1 or more."
    assert len(hub.start_server("jon", environment="needy").devices) == 1


def test_ten_thousand_environments(hub: CatalogHub) -> None:
    hub.form("ada")
    many = "".join(f"      - {{slug: e-{n}, image: none}}\n" for n in range(10_000))
    hub.write(CATALOG + many)
    hub.form("ada")  # it is read beside: nobody waits for a file of this size

    def known() -> bool:
        answer = hub.spawn("kim", {"environment": "e-9999", "gpus": 0})
        return answer.ok

    wait_for(known, "the large catalog", timeout=SOON)
    assert hub.wait_server("kim")["ready"]
    assert len(hub.form("ada").encode()) < 1_000_000
    wrong = message(hub.spawn("lea", {"environment": "nothing-like-it"}))
    assert wrong.endswith("more.") and len(wrong) < 500
    assert "Did you mean 'e-9999'" in message(hub.spawn("lea", {"environment": "e-99999"}))


def test_markup_stays_words_on_every_page(hub: CatalogHub) -> None:
    bad = '<script>alert("file")</script><img src=x onerror=alert("file")>'
    (hub.folder / "wild.md").write_text(f"{bad}\n\n[x](javascript:alert(1))")
    (hub.folder / "wild.txt").write_text(f"{bad}==1.0\n")
    cells = [
        {"cell_type": "markdown", "metadata": {}, "source": bad},
        {
            "cell_type": "code",
            "metadata": {},
            "source": bad,
            "execution_count": 1,
            "outputs": [
                {"output_type": "stream", "name": "stdout", "text": bad},
                {"output_type": "display_data", "metadata": {}, "data": {"text/html": bad}},
            ],
        },
    ]
    notebook = {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": cells}
    (hub.folder / "wild.ipynb").write_text(json.dumps(notebook))
    hub.write(wild().replace("allowed_groups:", "# allowed_groups:"))
    pages = [hub.form("ada")]
    for path in ("environments", "environments/wild"):
        answer = requests.get(f"{hub.url}/hub/{path}", headers=NAVIGATION, timeout=SOON)
        assert answer.status_code == 200, answer.text
        pages.append(answer.text)
    for page in pages:
        assert "alert(" in page, "it is shown, as words"
        for tag in ("<script>alert", "<img src=x", 'javascript:alert(1)"'):
            assert tag not in page
    # Its group is no group's name here; whoever may not use it is told so, in words.
    hub.write(wild())
    refused = message(hub.spawn("mia", {"environment": "wild"}))
    assert refused.startswith("You may not use the environment 'wild'")


def test_the_schema_for_editors_is_there_for_everybody(hub: CatalogHub) -> None:
    answer = requests.get(f"{hub.url}/services/gpu/catalog.schema.json", timeout=SOON)
    assert answer.status_code == 200
    jsonschema.Draft202012Validator.check_schema(answer.json())
    assert answer.json()["title"] == "gpuspawner's catalog of environments"
