"""A hub that files share is as new for each of them. Real: hub, proxy, service; local servers."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from gpuspawner.store import schema
from tests.support.hub import ADMIN
from tests.support.lines import fill, line_up
from tests.support.shared_hubs import SharedHub

SHARED_HUB = "line"

TABLES = (
    *(schema.leases, schema.tickets, schema.accounts, schema.transfers, schema.postings),
    *(schema.rates, schema.refills, schema.closures, schema.audit, schema.chain, schema.notices),
)


def rows(hub: SharedHub) -> dict[str, list[Any]]:
    with hub.broker.store.read() as connection:
        return {table.name: list(connection.execute(sa.select(table))) for table in TABLES}


def test_nothing_of_a_file_is_left_for_the_next_one(hubs: None, shared_hub: SharedHub) -> None:
    hub = shared_hub
    before = rows(hub)
    hub.make_groups(lab=["ada"])
    fill(hub, "ada", "bob", "cleo")
    line_up(hub, "dan")
    hub.broker.set_rate("2.5", model="T4", actor="kim", reason="weekends")
    hub.broker.pause(actor="kim", reason="fans")
    hub.write_catalog("environments: [{slug: other, image: none}]")
    (hub.folder / "notes").touch()
    assert rows(hub) != before

    hub.clear()
    assert rows(hub) == before
    assert [user["name"] for user in hub.api("GET", "users").json()] == [ADMIN]
    assert hub.api("GET", "groups").json() == []
    assert not (hub.folder / "notes").exists()
    assert hub.log_text() == "" or "ada" not in hub.log_text()
    assert hub.start_server("ada", gpus=2).environment == "default"
    assert hub.page("ada").ok
