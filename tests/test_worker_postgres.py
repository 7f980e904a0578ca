"""The worker on a server: it claims more while it works on what it has."""

import threading
from collections.abc import Iterator
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest

from fairturn import ClaimedDocument, Delays, Queue, State, Submission, Worker
from fairturn.content import Folder
from fairturn.errors import StoreUnavailable
from fairturn.model import Claimed
from fairturn.stores.postgres import PostgresStore
from fairturn.worker.events import DocumentEnded, Event, LinePrinted, StoreAnswers, StoreFailed
from tests.servers.queues import Databases

BACKGROUND = "fairturn-errand"


class WatchedStore(PostgresStore):
    """A store that tells which threads claim, and that can be away: a fault, where it happens."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.threads: set[str] = set()
        self.down_in_background = 0  # so many claims fail there
        self.arrived = threading.Event()  # one is there,
        self.go_on = threading.Event()  # and waits for this
        self.go_on.set()

    def claim(self, *args: Any, **options: Any) -> Claimed:
        name = threading.current_thread().name
        self.threads.add(name.partition("_")[0])
        if name.startswith(BACKGROUND):
            self.arrived.set()
            self.go_on.wait(30)
            if self.down_in_background:
                self.down_in_background -= 1
                raise StoreUnavailable("the server is away")
        return super().claim(*args, **options)


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
        assert any(name.startswith(BACKGROUND) for name in store.threads)
        assert queue.summary().completed == 3_000


def test_a_claim_that_fails_in_the_background_is_tried_again_and_nothing_is_lost(
    store: WatchedStore,
) -> None:
    queue = filled(store, 6_000)
    store.down_in_background = 3
    events: list[Event] = []

    with queue:
        done = Worker(queue, nothing, threads=True, on_event=events.append).run(until_empty=True)

    assert (done.completed, done.lost) == (6_000, 0)
    troubles = [type(event) for event in events if isinstance(event, StoreFailed | StoreAnswers)]
    assert troubles.count(StoreFailed) == 3
    assert troubles[-1] is StoreAnswers
    assert not any(a is b is StoreAnswers for a, b in pairwise(troubles))
    assert sum(isinstance(event, DocumentEnded) for event in events) == 6_000


def test_a_worker_that_is_stopped_gives_back_what_comes_from_a_claim_under_way(
    store: WatchedStore,
) -> None:
    queue = filled(store, 3_000)
    store.go_on.clear()
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


def test_an_error_of_the_listener_leaves_nothing_running_either(store: WatchedStore) -> None:
    queue = filled(store, 3_000)
    store.go_on.clear()

    begun = count()

    def stumble(document: object) -> None:
        if next(begun) >= 10:  # it is known to be fast, so that more is claimed in the background
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
    store.down_in_background = 1

    def fail(event: Event) -> None:
        if isinstance(event, StoreAnswers):
            raise RuntimeError("the listener has failed")

    with queue, pytest.raises(RuntimeError, match="the listener has failed"):
        Worker(queue, nothing, threads=True, on_event=fail).run(until_empty=True)

    reopened = PostgresStore(store.url)
    assert reopened.summary().running == 0
    reopened.close()


def test_a_worker_without_a_place_for_contents_does_everything_else(
    store: WatchedStore, tmp_path: Path
) -> None:
    elsewhere = Queue(store, contents=Folder(tmp_path / "contents"))
    large = elsewhere.submit("acme", content=b"x" * 300_000)
    small = [elsewhere.submit("acme", content=b"x") for _ in range(3)]

    with Queue(store) as queue:
        done = Worker(queue, size, threads=True, retry=Delays(first_s=0)).run(until_empty=True)

        assert done.completed == 3
        assert {queue.result(one.id) for one in small} == {1}
        ended = queue.get(large.id)
        assert ended.state is State.DEAD
        assert "--contents" in (ended.error or "")


def size(document: ClaimedDocument) -> int:
    return len(document.read())
