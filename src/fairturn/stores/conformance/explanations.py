"""Snapshots for explanations: a document and the queue around it."""

from collections import Counter

import pytest

from fairturn.clock import SECOND_US, ManualClock
from fairturn.explain.snapshot import (
    SIGN_ON_EVERY_US,
    AttemptSample,
    CountRange,
    DocumentSnapshot,
    WorkerHeartbeat,
)
from fairturn.model import Completed, Settings, State
from fairturn.scheduling.flows import Costs, Mode
from fairturn.scheduling.position import Position, position
from fairturn.scheduling.position.closed_form import DocumentsAhead
from fairturn.stores.conformance.steps import (
    LEASE_S,
    START,
    adjust,
    claim,
    claim_each,
    claim_one,
    complete,
    document,
    fail,
    find_all,
    ids,
    make,
    snapshot,
    submit,
    submit_each,
)
from fairturn.stores.conformance.suite import OpenStore, StoreSuite
from fairturn.stores.contract import QueueStore as Store


def document_snapshot(store: Store, id: str) -> DocumentSnapshot:
    found = store.snapshot(id)
    assert found is not None, f"there is no document {id}"
    return found


def place(store: Store, id: str) -> Position:
    found = document_snapshot(store, id)
    assert found.queue_view is not None, f"document {id} does not wait"
    settings = found.settings
    answer = position(found.queue_view, mode=settings.mode, costs=settings.costs)
    assert answer is not None, f"the customer of document {id} is paused"
    return answer


class ExplanationPromises(StoreSuite):
    """`Store.snapshot`."""

    def test_there_is_no_situation_of_a_document_that_is_not_there(self, store: Store) -> None:
        assert store.snapshot("0" * 15) is None
        assert store.snapshot("no id") is None

    @pytest.mark.parametrize("wanted", list(State))
    def test_the_document_is_what_is_read(
        self, store: Store, clock: ManualClock, wanted: State
    ) -> None:
        id = make(store, wanted, clock)

        assert document_snapshot(store, id).document == document(store, id)
        assert (document_snapshot(store, id).queue_view is not None) is (wanted is State.WAITING)

    def test_asking_changes_nothing_although_much_has_happened(
        self, store: Store, clock: ManualClock
    ) -> None:
        receipts = submit_each(store, "aabbb", due_at=START + SECOND_US)
        receipts += submit_each(store, "aabb")
        claim(store, 2)
        clock.advance(LEASE_S + 1)
        before = snapshot(store)

        for receipt in receipts:
            document_snapshot(store, receipt.id)

        assert snapshot(store) == before
        assert len(claim_each(store)) == 9

    @pytest.mark.parametrize("mode", list(Mode))
    def test_what_is_not_folded_in_yet_counts_as_the_next_claim_will_find_it(
        self, open_store: OpenStore, clock: ManualClock, mode: Mode
    ) -> None:
        store = open_store(settings=Settings(mode=mode), clock=clock)
        submit_each(store, "abab")
        held = claim(store, 2)
        submit_each(store, "ccabcab", due_at=START + SECOND_US)
        submit_each(store, "bca")
        store.finish([Completed(held[0].fence)])
        adjust(store, "b", weight=2)
        adjust(store, "d", paused=True)
        submit_each(store, "dcc")
        store.cancel([submit(store, "a").id])
        clock.advance(LEASE_S + 1)  # the other lease has expired, and the delays have ended
        waiting = [found.id for found in find_all(store) if found.customer != "d"]

        before = {id: store.snapshot(id) for id in waiting}
        order = ids(claim_each(store))

        for id, found in before.items():
            assert found is not None
            if id not in order:
                assert found.queue_view is None
                continue
            assert found.queue_view is not None
            answer = position(found.queue_view, mode=mode, costs=Costs.EQUAL)
            assert answer is not None
            assert answer.bounds == CountRange(order.index(id), order.index(id))

    @pytest.mark.parametrize("limit", [None, 3])
    def test_the_oldest_of_a_customer_is_placed_exactly_though_newer_ones_have_a_better_priority(
        self, store: Store, clock: ManualClock, limit: int | None
    ) -> None:
        *first, oldest = ids(submit_each(store, "aaaa"))
        store.cancel(first)
        clock.advance(1_501)  # beyond the patience, and the count is reset
        submit_each(store, "babab")
        adjust(store, "a", limit=limit)
        claim_one(store)  # of b; folds all events

        answer = place(store, oldest)

        assert answer.bounds == CountRange(4, 4)
        assert answer.before == DocumentsAhead(better_levels=2, own=2)
        assert ids(claim_each(store))[4:] == [oldest]

    def test_a_document_of_a_paused_customer_has_no_position(self, store: Store) -> None:
        id = submit(store, "a").id
        adjust(store, "a", paused=True)

        found = document_snapshot(store, id)

        assert found.customer_settings.paused
        assert found.queue_view is not None
        assert position(found.queue_view, mode=Mode.FAIR, costs=Costs.EQUAL) is None

    def test_a_customer_that_is_paused_or_at_its_limit_is_not_among_the_longest_waiting(
        self, store: Store, clock: ManualClock
    ) -> None:
        receipts = submit_each(store, "abbcd")
        adjust(store, "a", paused=True)
        adjust(store, "b", limit=1)
        claim(store, 1)  # of b
        clock.advance(1_000)

        found = document_snapshot(store, receipts[-1].id)

        assert found.queue_view is not None
        overdue = [found.names[front.customer] for front in found.queue_view.overdue]
        assert overdue == ["c", "d"]

    def test_a_limit_that_was_just_set_is_known_with_what_runs(self, store: Store) -> None:
        ids_of_a = ids(submit_each(store, "aaaa"))
        claim(store, 1)
        adjust(store, "a", limit=2)

        assert place(store, ids_of_a[1]).reached
        assert not place(store, ids_of_a[2]).reached
        assert document_snapshot(store, ids_of_a[2]).running == 1

    def test_the_snapshot_contains_the_count_and_the_counters_of_the_customer(
        self, store: Store
    ) -> None:
        receipts = submit_each(store, "aaabb")
        submit(store, "a", due_at=START + SECOND_US)
        claim(store, 1)

        found = document_snapshot(store, receipts[2].id)

        assert (found.waiting, found.running, found.delayed) == (2, 1, 1)
        assert found.count == (-3, START)
        assert found.names[found.customer] == "a"

    def test_the_snapshot_contains_the_count_of_a_parent(self, store: Store) -> None:
        parent = submit_each(store, "aa")[1]
        child = submit(store, "a", parent=parent.id)

        assert document_snapshot(store, child.id).parent_count == parent.count
        assert document_snapshot(store, parent.id).parent_count is None

    def test_running_documents_are_reported_with_worker_and_lease(
        self, store: Store, clock: ManualClock
    ) -> None:
        receipts = submit_each(store, "ab")
        claim_one(store, worker="short", lease_us=SECOND_US)
        claim_one(store, worker="long")
        clock.advance(2)

        running = document_snapshot(store, receipts[0].id).service.running

        assert [(w.worker, w.claimed_at, w.alive) for w in running] == [
            ("long", START, True),
            ("short", START, False),
        ]

    def test_a_worker_is_seen_at_its_last_heartbeat_with_its_slots(
        self, store: Store, clock: ManualClock
    ) -> None:
        id = submit(store).id
        store.sign_on("first", 2)
        store.sign_on("second", 3)
        clock.advance(SIGN_ON_EVERY_US / SECOND_US)
        store.sign_on("first", 4)

        seen = document_snapshot(store, id).service.workers

        assert seen == (
            WorkerHeartbeat("first", clock.now(), 4),
            WorkerHeartbeat("second", START, 3),
        )

    def test_a_claim_does_not_change_the_heartbeat_of_a_worker(self, store: Store) -> None:
        id = submit(store).id
        store.sign_on("worker-1", 4)

        claim(store, 900, worker="worker-1")

        assert document_snapshot(store, id).service.workers == (
            WorkerHeartbeat("worker-1", START, 4),
        )

    def test_a_heartbeat_does_not_change_the_version(self, store: Store) -> None:
        version = store.version()

        store.sign_on("worker-1", 4)

        assert store.version() == version

    def test_a_claim_that_finds_nothing_does_not_change_the_version(self, store: Store) -> None:
        submit(store)
        claim(store)
        version = store.version()

        claim(store, worker="another")

        assert store.version() == version

    def test_attempts_that_ended_are_reported_with_their_durations(
        self, store: Store, clock: ManualClock
    ) -> None:
        receipts = submit_each(store, "abcd")
        first, second, third = claim(store, 3)
        clock.advance(5)
        complete(store, [first])
        clock.advance(2)
        fail(store, second)
        fail(store, third, retry_in_s=60)

        attempts = document_snapshot(store, receipts[3].id).service.attempts

        durations = Counter(attempt.duration for attempt in attempts)
        assert durations == Counter([5 * SECOND_US, 7 * SECOND_US, None])
        assert all(isinstance(attempt, AttemptSample) for attempt in attempts)

    def test_arrivals_are_reported_newest_first(self, store: Store, clock: ManualClock) -> None:
        submit(store, "a")
        clock.advance(3)
        id = submit(store, "b").id

        arrivals = document_snapshot(store, id).service.arrivals

        assert [arrival.at for arrival in arrivals] == [START + 3 * SECOND_US, START]

    def test_customers_served_while_a_document_waited_are_reported(
        self, store: Store, clock: ManualClock
    ) -> None:
        submit_each(store, "ab")
        claim(store, 1)
        clock.advance(1)
        target = submit(store, "c")
        clock.advance(1)
        claim(store, 1)
        clock.advance(1)
        (claimed,) = claim(store, 1)
        assert claimed.document.id == target.id
        submit(store, "d")
        clock.advance(1)
        claim(store, 1)

        found = document_snapshot(store, target.id)

        assert found.served is not None
        assert {found.names[c]: n for c, n in found.served.by_customer.items()} == {"b": 1}
        assert found.served.complete

    def test_a_worker_that_was_not_seen_for_a_day_is_forgotten(
        self, store: Store, clock: ManualClock
    ) -> None:
        id = submit(store).id
        store.sign_on("worker-1", 1)
        clock.advance(25 * 3_600)

        while store.prune() is not None:
            pass

        assert document_snapshot(store, id).service.workers == ()

    def test_a_document_whose_lease_expired_for_the_last_time_waits_no_more(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        store = open_store(settings=Settings(attempts_max=1), clock=clock)
        id = submit(store).id
        claim(store)
        assert document_snapshot(store, id).queue_view is None

        clock.advance(LEASE_S + 1)

        assert document_snapshot(store, id).queue_view is None
