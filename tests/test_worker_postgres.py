"""The worker on a server: it claims more while it processes documents."""

import threading
from collections.abc import Iterator, Sequence
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import psycopg
import pytest

from fairturn import Backoff, ClaimedDocument, Queue, State, Submission, Worker
from fairturn.clock import stopwatch
from fairturn.contents.local import Folder
from fairturn.errors import StoreUnavailable
from fairturn.model import Claimed, Completed, Fence, Outcome, Released
from fairturn.stores.postgres import PostgresStore
from fairturn.worker.events import (
    DocumentCancelled,
    DocumentEnded,
    Event,
    LinePrinted,
    StoreFailed,
    StoreRecovered,
)
from tests.servers.queues import Databases
from tests.test_handlers import until


class WatchedStore(PostgresStore):
    """A store whose claims can fail or block."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.finished_during_claims = 0  # outcomes that were recorded while a claim was in flight
        self.claims_that_fail = 0
        self.claims_before_stuck = 1 << 62
        self.arrived = threading.Event()  # a claim is blocked
        self.go_on = threading.Event()  # and waits for this
        self._claiming_now = False

    def claim(self, *args: Any, **options: Any) -> Claimed:
        self.claims_before_stuck -= 1
        if self.claims_before_stuck < 0:
            self.arrived.set()
            assert self.go_on.wait(30)
        if self.claims_that_fail:
            self.claims_that_fail -= 1
            raise StoreUnavailable("the server is away")
        self._claiming_now = True
        try:
            return super().claim(*args, **options)
        finally:
            self._claiming_now = False

    def finish(self, outcomes: Sequence[Outcome]) -> list[Fence]:
        self.finished_during_claims += self._claiming_now
        return super().finish(outcomes)


@pytest.fixture
def store() -> Iterator[WatchedStore]:
    with Databases() as databases:
        opened = WatchedStore(databases.new())
        yield opened
        opened.close()


def filled(store: WatchedStore, documents: int) -> Queue:
    queue = Queue(store)
    queue.submit_many(Submission(customer=f"customer-{i % 7}", payload=i) for i in range(documents))
    return queue


def nothing(document: object) -> None:
    pass


def test_a_fast_handler_works_while_more_is_claimed_and_every_document_is_done_once(
    store: WatchedStore,
) -> None:
    queue = filled(store, 3_000)
    done: list[str] = []

    with queue:
        ended = Worker(queue, lambda document: done.append(document.id), threads=True).run(
            until_empty=True
        )

        assert ended.completed == 3_000
        assert len(set(done)) == len(done) == 3_000
        assert store.finished_during_claims > 0
        assert queue.summary().completed == 3_000


def test_a_claim_that_fails_is_tried_again_and_nothing_is_lost(
    store: WatchedStore,
) -> None:
    queue = filled(store, 6_000)
    store.claims_that_fail = 3
    events: list[Event] = []

    with queue:
        done = Worker(queue, nothing, threads=True, on_event=events.append).run(until_empty=True)

    assert (done.completed, done.lost) == (6_000, 0)
    troubles = [type(event) for event in events if isinstance(event, StoreFailed | StoreRecovered)]
    assert troubles.count(StoreFailed) == 3
    assert troubles[-1] is StoreRecovered
    assert not any(a is b is StoreRecovered for a, b in pairwise(troubles))
    # On a slow machine prefetched documents are released, which ends their attempts too.
    ended = [event.outcome for event in events if isinstance(event, DocumentEnded)]
    assert sum(isinstance(outcome, Completed) for outcome in ended) == 6_000
    assert all(isinstance(outcome, Completed | Released) for outcome in ended)


def test_a_worker_that_is_stopped_gives_back_what_comes_from_a_claim_under_way(
    store: WatchedStore,
) -> None:
    queue = filled(store, 3_000)
    store.claims_before_stuck = 2
    worker = Worker(queue, nothing, threads=True)
    thread = threading.Thread(target=worker.run)

    with queue:
        thread.start()
        assert store.arrived.wait(30)
        worker.stop()
        store.go_on.set()
        thread.join(30)

        assert not thread.is_alive()
        summary = queue.summary()
        assert summary.running == 0
        assert summary.completed + summary.waiting == 3_000
        assert summary.waiting > 0
        assert {document.attempts for document in queue.list(states=[State.WAITING]).documents} == {
            0
        }


def test_a_document_that_is_cancelled_while_it_waits_is_reported_to_one_of_two_workers(
    store: WatchedStore,
) -> None:
    queue = Queue(store)
    queue.set_customer("paused", paused=True)
    receipts = [queue.submit("paused", payload=n) for n in range(3)]
    events: list[Event] = []
    workers = [Worker(queue, nothing, threads=True, on_event=events.append) for _ in range(2)]
    threads = [
        threading.Thread(target=worker.run, kwargs={"until_empty": True}) for worker in workers
    ]

    with queue:
        for thread in threads:
            thread.start()
        until(lambda: bool(store.workers()), "a worker claims")
        for receipt in receipts:
            queue.cancel(receipt.id)
        for thread in threads:
            thread.join(30)

        documents = sorted(e.document for e in events if isinstance(e, DocumentCancelled))
        assert documents == sorted(queue.get(receipt.id) for receipt in receipts)


def test_an_error_of_the_listener_leaves_nothing_running_either(
    store: WatchedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A busy machine may need longer to release a thousand documents.
    monkeypatch.setattr("fairturn.worker.supervisor.ANSWER_S", 30.0)
    queue = filled(store, 3_000)
    store.claims_before_stuck = 1

    begun = count()

    def stumble(document: object) -> None:
        if next(begun) >= 3:  # the last of the first claim; the slots of the others are free
            assert store.arrived.wait(30)
            raise ValueError("what is printed of this is told while the claim is under way")

    def fail(event: Event) -> None:
        if isinstance(event, LinePrinted):
            store.go_on.set()
            raise RuntimeError("the listener has failed")

    with queue, pytest.raises(RuntimeError, match="the listener has failed"):
        Worker(queue, stumble, threads=True, on_event=fail).run(until_empty=True)

    reopened = PostgresStore(store.url)
    assert reopened.summary().running == 0
    reopened.close()


def test_an_error_of_the_listener_when_the_server_is_back_leaves_nothing_running(
    store: WatchedStore,
) -> None:
    queue = filled(store, 3_000)
    store.claims_that_fail = 1

    def fail(event: Event) -> None:
        if isinstance(event, StoreRecovered):
            raise RuntimeError("the listener has failed")

    with queue, pytest.raises(RuntimeError, match="the listener has failed"):
        Worker(queue, nothing, threads=True, on_event=fail).run(until_empty=True)

    reopened = PostgresStore(store.url)
    assert reopened.summary().running == 0
    reopened.close()


def test_leases_are_renewed_and_stop_is_obeyed_while_another_transaction_blocks_claims(
    store: WatchedStore,
) -> None:
    queue = Queue(store)
    queue.submit("acme")
    runs: list[str] = []
    ends = threading.Event()

    def run_on(document: ClaimedDocument) -> None:
        runs.append(document.id)
        ends.wait(30)

    workers = [
        Worker(queue, run_on, threads=True, concurrency=2, lease_s=1, grace_s=0.5)
        for queue in (queue, Queue(PostgresStore(store.url)))
    ]
    threads = [threading.Thread(target=worker.run) for worker in workers]
    for thread in threads:
        thread.start()
    until(lambda: bool(runs), "the document runs")
    with psycopg.connect(store.url) as holder:
        holder.execute("SELECT FROM fairturn.queue FOR NO KEY UPDATE")
        over_s = stopwatch() + 3.0
        until(lambda: stopwatch() > over_s, "three leases pass")
        begun_s = stopwatch()
        for worker in workers:
            worker.stop()
        for thread in threads:
            thread.join(20)
        took_s = stopwatch() - begun_s
    ends.set()

    assert took_s < 0.5 + 1.0 + 0.5  # the grace period, a second, and slack for a busy machine
    assert len(runs) == 1
    # The blocked claims return after the workers have stopped, and release their documents.
    until(
        lambda: not any(thread.name == "fairturn-claim" for thread in threading.enumerate()),
        "the blocked claims return",
    )
    document = queue.get(runs[0])
    assert (document.state, document.attempts) == (State.WAITING, 0)


def test_a_worker_without_a_place_for_contents_does_everything_else(
    store: WatchedStore, tmp_path: Path
) -> None:
    elsewhere = Queue(store, contents=Folder(tmp_path / "contents"))
    large = elsewhere.submit("acme", content=b"x" * 300_000)
    small = [elsewhere.submit("acme", content=b"x") for _ in range(3)]

    with Queue(store) as queue:
        done = Worker(queue, size, threads=True, retry=Backoff(first_s=0)).run(until_empty=True)

        assert done.completed == 3
        assert {queue.result(one.id) for one in small} == {1}
        ended = queue.get(large.id)
        assert ended.state is State.DEAD
        assert "--contents" in (ended.error or "")


def size(document: ClaimedDocument) -> int:
    return len(document.read())
