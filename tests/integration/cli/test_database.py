"""The database from a shell: audit, copies, the chain's head. Real: the command."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gpuspawner.core.units import MICRO
from gpuspawner.services import Services
from tests.support.brokers import acquire
from tests.support.command import Command


def test_audit_reports_a_wrong_balance(cli: Command, services: Services) -> None:
    said = cli("audit").stdout
    assert said.splitlines()[0].startswith("ok      ")
    assert "Every invariant holds. Rows: 3 accounts, 0 leases, 2 transfers" in said
    assert cli.json("audit")["ok"] is True
    with services.store.engine.connect() as connection:
        connection.exec_driver_sql("UPDATE accounts SET balance = 7 WHERE name = 'member:ada'")
        connection.commit()
    done = cli("audit", code=1)
    assert "BROKEN  The balance of each account is the sum of its postings." in done.stdout
    assert "The balance of member:ada is 7 microcredits, but its postings sum to" in done.stdout
    assert "1 invariant broken; the first row of each is named above." in done.stdout
    told = cli.json("audit", code=1)
    assert [x["name"] for x in told["invariants"] if not x["ok"]] == ["balances"]


def test_backup_can_be_checked_and_restored(
    cli: Command, services: Services, tmp_path: Path
) -> None:
    acquire(services, "ada")
    said = cli("backup", "monday.copy").stdout
    assert said.startswith("Copied the database to monday.copy (")
    assert "for its owner only" in said
    assert "use --overwrite" in cli("backup", "monday.copy", code=1).stderr
    assert cli.json("backup", "monday.copy", "--overwrite")["bytes"] > 0
    assert "every invariant holds" in cli("restore", "--check", "monday.copy").stdout
    assert "The database is in use" in cli("restore", "--overwrite", "monday.copy", code=1).stderr
    services.store.close()
    assert "There is a database already" in cli("restore", "monday.copy", code=1).stderr
    done = json.loads(cli("restore", "monday.copy", "--overwrite", "--json").stdout)
    assert done["restored"] and done["kept"] and done["rows"]["leases"] == 1
    os.truncate(tmp_path / "monday.copy", 5000)
    assert "cut short" in cli("restore", "--check", "monday.copy", code=1).stderr


def test_audit_prints_the_chain_head_and_finds_it_later(
    cli: Command, services: Services, tmp_path_factory: pytest.TempPathFactory
) -> None:
    services.ledger.open_account("anna")
    told = cli.json("audit")
    head = told["head"]
    assert f"Head of the audit chain (keep it elsewhere): {head}" in cli("audit").stdout
    services.ledger.grant("member:anna", MICRO, actor="root", reason="prize")
    assert cli.json("audit", "--head", head)["knows_head"] is True
    done = cli("audit", "--head", head.replace(".", ".1", 1), code=1)
    assert "The chain does not contain the head" in done.stdout
    copy = tmp_path_factory.mktemp("copies") / "copy.sqlite"
    saved = cli.json("backup", str(copy))
    assert saved["head"] == cli.json("audit")["head"] != head
    services.store.close()
    kept = cli.json("audit", "--database", f"sqlite:///{copy}", "--head", head)
    assert kept["head"] == saved["head"] and kept["knows_head"] is True, "the copy has the chain"
