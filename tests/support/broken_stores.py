"""A broker whose database fails, and what must hold then and afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from gpuspawner.core.errors import StoreUnavailable
from gpuspawner.core.units import MICRO
from gpuspawner.leases.models import ServerRef
from gpuspawner.services import Broker
from tests.support.brokers import Clock, acquire, open_broker, problems, running

SENTENCE = "The database does not answer. Try again in a moment; nothing was changed."


@contextmanager
def in_use(url: str) -> Iterator[Broker]:
    """A broker in the middle of its life: one server runs, one has come and gone."""
    clock = Clock()
    broker = open_broker(url, clock, gpu_rates={"*": 4})
    try:
        running(broker, "anna", 2)
        gone = running(broker, "bert")
        clock.forward(hours=1)
        broker.ledger.charge_all()
        broker.release(gone.id, ended_at=clock.now, reason="stopped")
        yield broker
        assert problems(broker.store) == []
    finally:
        broker.store.close()


def assert_unavailable(broker: Broker, *, reads: bool = True) -> None:
    """Nothing can be written (nor read), and that is said in words, while it is so."""
    works: list[Callable[[], Any]] = [
        partial(acquire, broker, "cara"),
        partial(broker.confirm, "any"),
        partial(broker.release, "any", reason="stopped"),
        partial(broker.ledger.grant, "member:anna", 1, actor="admin", reason="gift"),
        partial(broker.ledger.open_account, "cara"),
        broker.ledger.charge_all,
    ]
    if reads:
        works += [broker.open_leases, broker.ledger.accounts]
    for work in works:
        with pytest.raises(StoreUnavailable) as caught:
            work()
        assert caught.value.message == SENTENCE


def assert_works(broker: Broker) -> None:
    """As it was before, and it goes on."""
    (lease,) = broker.open_leases()
    assert lease.server == ServerRef("anna") and lease.charged == 8 * MICRO
    assert broker.ledger.member("bert").balance == 96 * MICRO
    assert [account.name for account in broker.ledger.accounts()] == ["member:anna", "member:bert"]
    added = acquire(broker, "cara")
    broker.release(added.id, reason="enough")
    assert broker.ledger.grant("member:bert", 4 * MICRO, actor="admin", reason="gift")
    assert problems(broker.store) == []
