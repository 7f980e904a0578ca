"""Cancels of waiting and running documents, their reports, and retries of dead documents."""

import pytest

from fairturn.clock import SECOND_US, ManualClock
from fairturn.model import (
    CANCELS_KEPT_MAX,
    CANCELS_REPORTED_MAX,
    ENDED,
    Completed,
    Document,
    Settings,
    State,
)
from fairturn.stores.conformance.steps import (
    LEASE_US,
    START,
    adjust,
    assert_numbers_are_exact,
    claim,
    claim_one,
    complete,
    customer,
    customers_of,
    document,
    fail,
    ids,
    make,
    new,
    prune_all,
    snapshot,
    state,
    submit,
    submit_each,
)
from fairturn.stores.conformance.suite import OpenStore, StoreSuite
from fairturn.stores.contract import QueueStore as Store

UNKNOWN = ["", "no such document", "0" * 15, "f" * 15]


class CancelPromises(StoreSuite):
    """`Store.cancel`."""

    @pytest.mark.parametrize("begun", [State.WAITING, State.DELAYED])
    def test_a_document_that_has_not_begun_is_cancelled(
        self, store: Store, clock: ManualClock, begun: State
    ) -> None:
        id = make(store, begun)
        clock.advance(2)

        assert store.cancel([id]) == [State.CANCELLED]

        found = document(store, id)
        assert (found.state, found.ended_at_us) == (State.CANCELLED, START + 2 * SECOND_US)
        assert (found.attempts, found.error) == (0, None)
        clock.advance(7_200)
        assert claim(store) == []
        assert_numbers_are_exact(store)

    def test_a_document_between_two_attempts_is_cancelled(
        self, store: Store, clock: ManualClock
    ) -> None:
        receipt = submit(store)
        fail(store, claim_one(store), retry_in_s=5)

        assert store.cancel([receipt.id]) == [State.CANCELLED]

        clock.advance(10)
        assert claim(store) == []

    def test_a_running_document_is_asked_to_stop(self, store: Store) -> None:
        id = make(store, State.RUNNING)
        before = document(store, id)

        assert store.cancel([id]) == [State.RUNNING]

        after = document(store, id)
        assert (before.cancel_requested, after.cancel_requested) == (False, True)
        assert (after.state, after.ended_at_us) == (State.RUNNING, None)

    @pytest.mark.parametrize("ended", ENDED)
    def test_cancelling_leaves_an_ended_document_as_it_ended(
        self, store: Store, clock: ManualClock, ended: State
    ) -> None:
        id = make(store, ended, clock)
        before = snapshot(store)
        clock.advance(2)

        assert store.cancel([id]) == [ended]

        assert snapshot(store) == before

    @pytest.mark.parametrize("id", UNKNOWN)
    def test_a_document_that_does_not_exist_cannot_be_cancelled(
        self, store: Store, id: str
    ) -> None:
        submit(store)
        before = snapshot(store)

        assert store.cancel([id]) == [None]

        assert snapshot(store) == before

    def test_one_call_answers_for_each_document_in_the_order_given(self, store: Store) -> None:
        running = make(store, State.RUNNING)
        dead = make(store, State.DEAD)
        waiting = make(store, State.WAITING)
        delayed = make(store, State.DELAYED)

        states = store.cancel([dead, "unknown", waiting, running, delayed, waiting])

        assert states == [
            State.DEAD,
            None,
            State.CANCELLED,
            State.RUNNING,
            State.CANCELLED,
            State.CANCELLED,
        ]
        assert_numbers_are_exact(store)

    def test_cancelling_or_retrying_nothing_changes_nothing(self, store: Store) -> None:
        submit(store)
        before = snapshot(store)

        assert store.cancel([]) == []
        assert store.retry([]) == []

        assert snapshot(store) == before

    def test_the_others_keep_their_order(self, store: Store) -> None:
        receipts = submit_each(store, "aaabbbccc")

        store.cancel([receipts[0].id, receipts[4].id, receipts[8].id])

        claims = claim(store, 9)
        assert customers_of(claims) == "abcabc"
        assert ids(claims) == ids([receipts[n] for n in (1, 3, 6, 2, 5, 7)])

    def test_a_first_document_that_was_claimed_and_cancelled_leaves_the_next_in_its_place(
        self, store: Store
    ) -> None:
        receipts = submit_each(store, "aaa")
        claim_one(store)

        store.cancel([receipts[1].id])

        assert ids(claim(store, 9)) == [receipts[2].id]


def report(store: Store, n: int = 0) -> list[Document]:
    """Return the cancelled documents that a claim reports."""
    return store.claim(n, worker="worker-1", lease_us=LEASE_US).cancelled


class CancelReportPromises(StoreSuite):
    """`Claimed.cancelled`."""

    @pytest.mark.parametrize("begun", [State.WAITING, State.DELAYED])
    def test_a_claim_reports_a_document_that_was_cancelled_before_it_began(
        self, store: Store, clock: ManualClock, begun: State
    ) -> None:
        id = make(store, begun)
        clock.advance(2)
        store.cancel([id])

        assert report(store) == [document(store, id)]

    def test_a_document_that_is_cancelled_between_two_attempts_is_reported(
        self, store: Store
    ) -> None:
        receipt = submit(store)
        fail(store, claim_one(store), retry_in_s=5)
        store.cancel([receipt.id])

        (found,) = report(store)

        assert found == document(store, receipt.id)
        assert (found.state, found.attempts, found.error) == (State.CANCELLED, 1, "it failed")

    def test_each_is_reported_by_one_claim(self, store: Store) -> None:
        receipts = submit_each(store, "aab")
        store.cancel([receipts[0].id])
        first = report(store)
        store.cancel(ids(receipts[:2]))

        assert ids(first) == ids(receipts[:1])
        assert ids(report(store)) == ids(receipts[1:2])
        assert report(store) == []

    def test_they_are_reported_in_the_order_of_the_cancels(
        self, store: Store, clock: ManualClock
    ) -> None:
        receipts = submit_each(store, "abcde")
        store.cancel(ids([receipts[3], receipts[1]]))
        clock.set(START - 3_600 * SECOND_US)  # the order does not depend on the clock
        store.cancel(ids([receipts[1], receipts[4], receipts[0], receipts[4]]))

        assert ids(report(store)) == ids([receipts[n] for n in (3, 1, 4, 0)])

    def test_a_claim_that_takes_documents_or_records_outcomes_reports_them_too(
        self, store: Store
    ) -> None:
        receipts = submit_each(store, "abcd")
        first = claim_one(store)
        store.cancel([receipts[1].id])
        taking = store.claim(1, worker="w", lease_us=LEASE_US)
        store.cancel([receipts[3].id])
        recording = store.claim(1, worker="w", lease_us=LEASE_US, outcomes=[Completed(first.fence)])

        assert (ids(taking.claims), ids(taking.cancelled)) == ([receipts[2].id], [receipts[1].id])
        assert (recording.claims, ids(recording.cancelled)) == ([], [receipts[3].id])

    def test_a_paused_customer_s_documents_are_reported(self, store: Store) -> None:
        adjust(store, "a", paused=True)
        receipts = submit_each(store, "aa")
        claim(store)
        store.cancel([receipts[0].id])

        assert ids(report(store, 1)) == [receipts[0].id]

    def test_a_document_that_was_running_or_had_ended_is_not_reported(self, store: Store) -> None:
        claims = [claim_one(store) for _ in submit_each(store, "abc")]
        complete(store, claims[:1])
        fail(store, claims[1])

        store.cancel(["unknown", *ids(claims)])

        assert report(store) == []

    def test_a_claim_that_reports_changes_nothing_else(self, store: Store) -> None:
        receipts = submit_each(store, "aab")
        store.cancel(ids(receipts[:1]))
        claim(store, 0)  # folds and reports the cancel
        store.cancel(ids(receipts[1:2]))
        before = snapshot(store)

        assert len(report(store)) == 1

        assert snapshot(store) == before
        assert_numbers_are_exact(store)
        assert ids(claim(store, 9)) == [receipts[2].id]

    def test_a_document_that_was_purged_or_pruned_is_not_reported(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        store = open_store(clock=clock, settings=Settings(cancelled_kept_s=60))
        pruned = submit(store, "a")
        store.cancel([pruned.id])
        clock.advance(61)
        prune_all(store)
        purged, kept = submit_each(store, "bc")
        store.cancel([purged.id, kept.id])
        store.purge("b")

        assert ids(report(store)) == [kept.id]

    def test_a_claim_reports_a_limited_number_and_the_oldest_are_dropped(
        self, store: Store
    ) -> None:
        later = START + SECOND_US
        receipts = store.submit([new(due_at=later)] * CANCELS_KEPT_MAX)
        receipts.append(submit(store, due_at=later))
        for start in range(0, len(receipts), 1_000):
            store.cancel(ids(receipts[start : start + 1_000]))

        reports = [report(store) for _ in range(CANCELS_KEPT_MAX // CANCELS_REPORTED_MAX)]

        assert {len(found) for found in reports} == {CANCELS_REPORTED_MAX}
        assert ids(found for each in reports for found in each) == ids(receipts[1:])
        assert report(store) == []


class RetryPromises(StoreSuite):
    """`Store.retry`."""

    def test_a_dead_document_waits_again_as_if_it_had_never_run(
        self, store: Store, clock: ManualClock
    ) -> None:
        store.submit([new()] * 3)
        receipt = submit(store)
        before = claim(store, 4)[-1]
        fail(store, before)
        clock.advance(3_600)

        assert store.retry([receipt.id]) == [State.DEAD]

        found = document(store, receipt.id)
        assert (found.state, found.attempts, found.ended_at_us) == (State.WAITING, 0, None)
        assert (found.count, found.priority) == (receipt.count, receipt.priority) == (-3, 2)
        assert found.order == before.document.order
        assert customer(store, "acme").count_updated_at_us == START
        assert_numbers_are_exact(store)

    def test_a_retried_document_comes_before_those_submitted_after_it(self, store: Store) -> None:
        first, second = store.submit([new(), new()])
        fail(store, claim_one(store))

        store.retry([first.id])

        assert ids(claim(store, 2)) == [first.id, second.id]

    def test_a_retried_document_has_all_its_attempts_and_a_higher_fence(self, store: Store) -> None:
        receipt = submit(store)
        fences = []
        for _ in range(2):
            for _ in range(5):
                claimed = claim_one(store)
                fences.append(claimed.fence.number)
                fail(store, claimed, retry_in_s=0)
            assert store.retry([receipt.id]) == [State.DEAD]

        assert fences == sorted(set(fences))

    @pytest.mark.parametrize("other", [s for s in State if s is not State.DEAD])
    def test_retrying_leaves_a_document_that_is_not_dead_alone(
        self, store: Store, clock: ManualClock, other: State
    ) -> None:
        id = make(store, other, clock)
        before = snapshot(store)

        assert store.retry([id]) == [other]

        assert snapshot(store) == before

    @pytest.mark.parametrize("id", UNKNOWN)
    def test_a_document_that_does_not_exist_cannot_be_retried(self, store: Store, id: str) -> None:
        submit(store)
        before = snapshot(store)

        assert store.retry([id]) == [None]

        assert snapshot(store) == before

    def test_a_document_that_comes_twice_in_one_call_is_retried_once(self, store: Store) -> None:
        id = make(store, State.DEAD)

        assert store.retry([id, "unknown", id]) == [State.DEAD, None, State.WAITING]

        assert len(claim(store, 2)) == 1
        assert_numbers_are_exact(store)

    def test_a_retried_document_can_be_completed(self, store: Store) -> None:
        id = make(store, State.DEAD)
        store.retry([id])

        complete(store, claim(store))

        assert state(store, id) is State.COMPLETED
        assert document(store, id).error is None
