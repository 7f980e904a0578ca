"""After a failover that lost the tail of the WAL, and after a restored backup, nothing is reused.

Receipts and claims that are not in the surviving database stay void: no document gets their id, no
claim gets their fence, and an outcome with such a fence is rejected. Every document that is
accepted afterwards is claimed, also by processes that were running all the time.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import pytest

from fairturn.clock import SECOND_US
from fairturn.errors import StoreUnavailable
from fairturn.model import Claim, Completed, Failed, Fence, NewDocument, Outcome, Receipt
from fairturn.stores.postgres import PostgresStore
from tests.servers import dumps, replicas
from tests.servers.queues import Databases

LEASE_US = 30 * SECOND_US
_ATTEMPTS = 50  # of a call during the failover
_TAIL = 60  # lost transactions

T = TypeVar("T")


class History:
    """Everything that a queue has returned, and two stores that stay open throughout."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.receipts: list[Receipt] = []
        self.claims: list[Claim] = []
        self.submitter, self.worker = PostgresStore(url), PostgresStore(url)
        self.stores = [self.submitter, self.worker]

    def submit(self, *customers: str, store: PostgresStore | None = None) -> list[Receipt]:
        """Submit one document for each customer, each in its own transaction."""
        submit = (store or self.submitter).submit
        receipts = []
        for customer in customers:
            documents = [NewDocument(customer, f'"{customer}"')]
            receipts += persistently(partial(submit, documents))
        self.receipts += receipts
        return receipts

    def claim(self, n: int, store: PostgresStore | None = None) -> list[Claim]:
        claims = persistently(
            lambda: (store or self.worker).claim(n, worker="w", lease_us=LEASE_US).claims
        )
        self.claims += claims
        return claims

    def reopen(self) -> None:
        """Open the store in a new process."""
        self.stores.append(PostgresStore(self.url))

    def close(self) -> None:
        for store in self.stores:
            store.close()


def persistently(call: Callable[[], T]) -> T:
    """Repeat a call while the store is unavailable, as clients and workers do."""
    for _ in range(_ATTEMPTS):
        try:
            return call()
        except StoreUnavailable as error:
            last = error
    raise last


def live(history: History) -> None:
    """Use the queue before the backup or the cut of replication."""
    history.submit(*"aabbcc")
    claims = history.claim(3)
    assert (
        history.worker.finish([Completed(claims[0].fence), Failed(claims[1].fence, "x", 0)]) == []
    )


def live_on(history: History) -> list[Fence]:
    """Use the queue after it; return the fences of the attempts that will be lost."""
    history.submit(*(f"lost{n % 7}" for n in range(_TAIL)))
    return [claim.fence for claim in history.claim(4)]


def problems_after(history: History, lost: list[Fence]) -> list[str]:
    """Return what is reused, accepted although void, or never claimed."""
    found = []
    try:
        for problem in _problems_after(history, lost):
            found.append(problem)
    except Exception as error:
        found.append(f"the queue raised {type(error).__name__}: {error}")
    return found


def _problems_after(history: History, lost: list[Fence]) -> Iterator[str]:
    history.reopen()
    ids = {receipt.id for receipt in history.receipts}
    highest = max(claim.fence.number for claim in history.claims)
    yield from _accepted(history, lost)
    accepted = [
        receipt
        for n, store in enumerate(history.stores)
        for receipt in history.submit(*(f"new{n}-{m}" for m in range(5)), store=store)
    ]
    for receipt in accepted:
        if receipt.id in ids:
            yield f"the id {receipt.id} was given out twice"
    claims = [claim for store in history.stores[::-1] for claim in history.claim(2, store)]
    yield from _accepted(history, lost)
    for turn in range(100):
        claims += history.claim(20, history.stores[turn % 2])  # stores that stayed open
        waiting = persistently(history.submitter.summary).waiting
        if not waiting:
            break
    for claim in claims:
        if claim.fence.number <= highest:
            yield f"the fence {claim.fence} is not higher than {highest}, which was given out"
    claimed = {claim.document.id for claim in claims}
    for receipt in accepted:
        if receipt.id not in claimed:
            yield f"a document of {receipt.customer} that was accepted afterwards is never claimed"
    yield from _accepted(history, lost)
    own = [Completed(claim.fence) for claim in claims]
    for fence in persistently(lambda: history.worker.finish(own)):
        yield f"the outcome of {fence}, which was claimed afterwards, is refused"


def _accepted(history: History, lost: list[Fence]) -> Iterator[str]:
    stale: list[Outcome] = [Failed(fence, "stale") for fence in lost]
    refused = persistently(lambda: history.worker.finish(stale))
    for fence in lost:
        if fence not in refused:
            yield f"the outcome of {fence}, which is void, was recorded"


def begin_epoch(store: PostgresStore) -> None:
    """Run `fairturn restored` after a restore that the store cannot detect."""
    begin: Callable[[], None] | None = getattr(store, "begin_epoch", None)
    assert begin is not None, "the store has no begin_epoch"
    begin()


# ── A standby that missed the last commits ───────────────────────────────────────────────────────


def test_a_failover_that_lost_the_tail_of_the_log_gives_nothing_out_twice() -> None:
    with replicas.started() as servers, closing(History(servers.url)) as history:
        live(history)
        servers.cut_replication()
        lost = live_on(history)
        servers.fail_over()

        found = problems_after(history, lost)

    assert not found, "\n".join(found)


@pytest.mark.long
def test_a_failover_before_the_first_claim_gives_nothing_out_twice() -> None:
    with replicas.started() as servers, closing(History(servers.url)) as history:
        history.submit("a")
        servers.cut_replication()
        lost = live_on(history)
        servers.fail_over()

        found = problems_after(history, lost)

    assert not found, "\n".join(found)


@pytest.mark.long
def test_documents_accepted_after_a_failover_are_claimed_by_a_worker_that_lived_through_it() -> (
    None
):
    with replicas.started() as servers, closing(History(servers.url)) as history:
        live(history)
        servers.cut_replication()
        live_on(history)
        servers.fail_over()
        accepted = {receipt.id for receipt in history.submit(*(f"new{n}" for n in range(5)))}

        claims = [claim for _ in range(10) for claim in history.claim(10)]

    assert accepted <= {claim.document.id for claim in claims}


# ── Restored backups ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.long
def test_a_restored_dump_gives_nothing_out_twice(databases: Databases, tmp_path: Path) -> None:
    url = databases.new()
    name = urlsplit(url).path.lstrip("/")
    with closing(History(url)) as history:
        live(history)
        dumps.dump(url, tmp_path / "dump")
        lost = live_on(history)
        dumps.restore(tmp_path / "dump", name)

        found = problems_after(history, lost)

    assert not found, "\n".join(found)


@pytest.mark.long
def test_a_data_directory_that_was_put_back_gives_nothing_out_twice_after_begin_epoch() -> None:
    with replicas.single() as server, closing(History(server.url)) as history:
        live(history)
        server.end(signal.SIGINT)
        copy = replicas.copy_of(server)
        server.start()
        lost = live_on(history)
        server.end(signal.SIGINT)
        replicas.put_back(server, copy)
        server.start()
        begin_epoch(PostgresStore(server.url))

        found = problems_after(history, lost)

    assert not found, "\n".join(found)
