"""Leases: expiry and renewal."""

import pytest

from fairturn.clock import SECOND_US, ManualClock
from fairturn.model import (
    LEASE_US_MAX,
    LEASE_US_MIN,
    Completed,
    Failed,
    Fence,
    Released,
    Settings,
    State,
)
from fairturn.scheduling.flows import Mode
from fairturn.stores.conformance.steps import (
    LEASE_S,
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
    snapshot,
    state,
    submit,
    submit_each,
)
from fairturn.stores.conformance.suite import OpenStore, StoreSuite
from fairturn.stores.contract import QueueStore as Store

YEAR_2038 = 2_147_483_648 * SECOND_US
MICROSECOND = 1 / SECOND_US


class LeasePromises(StoreSuite):
    """Expired leases."""

    def test_a_document_can_be_claimed_again_when_its_lease_has_ended_and_not_before(
        self, store: Store, clock: ManualClock
    ) -> None:
        receipt = submit(store)
        claim_one(store)

        clock.advance(LEASE_S - MICROSECOND)
        assert claim(store) == []
        clock.advance(MICROSECOND)
        assert ids(claim(store)) == [receipt.id]

    @pytest.mark.parametrize("lease_us", [1, LEASE_US_MIN, 24 * 3_600 * SECOND_US])
    def test_each_lease_is_as_long_as_its_claim_asked_for(
        self, store: Store, clock: ManualClock, lease_us: int
    ) -> None:
        submit(store)
        claim_one(store, lease_us=lease_us)

        clock.advance((lease_us - 1) / SECOND_US)
        assert claim(store) == []
        clock.advance(MICROSECOND)
        assert len(claim(store)) == 1

    def test_a_document_whose_lease_ended_keeps_priority_and_order_and_makes_no_check(
        self, store: Store, clock: ManualClock
    ) -> None:
        receipts = store.submit([new()] * 6)
        first = claim(store, 6)
        clock.advance(LEASE_S)

        second = claim(store, 6)

        assert ids(second) == ids(receipts)
        for before, after in zip(first, second, strict=True):
            assert after.document.priority == before.document.priority
            assert after.document.order == before.document.order
            assert after.document.count == before.document.count
            assert after.document.attempts == 2
            assert "lease expired" in (after.document.error or "")
        assert customer(store, "acme").count == -5

    def test_leases_that_ended_are_taken_back_the_oldest_first(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        store = open_store(clock=clock, settings=Settings(mode=Mode.EQUAL))
        submit_each(store, "abc")
        for lease_s in (30, 10, 20):
            claim(store, lease_us=lease_s * SECOND_US)
        clock.advance(30)

        assert customers_of(claim(store, 3)) == "bca"

    def test_a_lease_that_ended_counts_as_an_attempt_and_the_last_one_makes_dead(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        store = open_store(clock=clock, settings=Settings(attempts_max=2))
        receipt = submit(store)
        for _ in range(2):
            claim_one(store)
            clock.advance(LEASE_S)

        assert claim(store) == []

        found = document(store, receipt.id)
        assert (found.state, found.attempts) == (State.DEAD, 2)
        assert found.ended_at_us == START + 2 * LEASE_US
        assert "lease expired" in (found.error or "")

    def test_a_document_to_be_cancelled_is_cancelled_when_its_lease_ends(
        self, store: Store, clock: ManualClock
    ) -> None:
        receipt = submit(store)
        claim_one(store)
        store.cancel([receipt.id])
        clock.advance(LEASE_S)

        assert claim(store) == []

        found = document(store, receipt.id)
        assert (found.state, found.ended_at_us) == (State.CANCELLED, START + LEASE_US)

    def test_a_lease_that_ended_makes_room_under_a_limit(
        self, store: Store, clock: ManualClock
    ) -> None:
        adjust(store, "acme", limit=1)
        first, _ = store.submit([new(), new()])
        claim_one(store)
        clock.advance(LEASE_S)

        assert ids(claim(store, 2)) == [first.id]

    def test_the_charge_of_a_lease_that_ended_is_not_given_back(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        store = open_store(clock=clock, settings=Settings(mode=Mode.EQUAL))
        submit_each(store, "aabb")
        claim_one(store)
        clock.advance(LEASE_S)

        assert customers_of(claim(store, 4)) == "baba"

    def test_numbers_are_exact_when_leases_end(self, store: Store, clock: ManualClock) -> None:
        store.submit([new()] * 5)
        claim(store, 3)
        clock.advance(LEASE_S)
        claim(store, 1)

        assert_numbers_are_exact(store)
        assert (store.summary().waiting, store.summary().running) == (4, 1)

    # ── Clocks that step ─────────────────────────────────────────────────────────────────────────

    @pytest.mark.parametrize("step_s", [1, -1, 3_600, -3_600, 1_501, -1_501, 10**9])
    def test_a_step_of_the_wall_clock_ends_no_lease_and_makes_none_longer(
        self, store: Store, clock: ManualClock, step_s: int
    ) -> None:
        submit(store)
        claimed = claim_one(store)

        clock.step(step_s)
        assert claim(store) == []
        clock.advance(LEASE_S - MICROSECOND)
        assert claim(store) == []
        clock.advance(MICROSECOND)
        assert [again.document.id for again in claim(store)] == [claimed.document.id]

    @pytest.mark.parametrize("at", [YEAR_2038, 0, 2**52])
    def test_a_wall_clock_at_the_edges_of_time_ends_no_lease(
        self, store: Store, clock: ManualClock, at: int
    ) -> None:
        submit(store)
        claimed = claim_one(store)

        clock.set(at)

        assert claim(store) == []
        assert submit(store).priority == 1
        complete(store, [claimed])
        assert document(store, claimed.document.id).ended_at_us == at

    def test_a_renewal_counts_time_that_passed_and_not_steps(
        self, store: Store, clock: ManualClock
    ) -> None:
        submit(store)
        claimed = claim_one(store)
        clock.advance(20)
        clock.step(-3_600)

        assert store.renew([claimed.fence], lease_us=LEASE_US) == ([], [])

        clock.advance(LEASE_S - MICROSECOND)
        assert claim(store) == []
        clock.advance(MICROSECOND)
        assert len(claim(store)) == 1

    @pytest.mark.parametrize("ahead_s, claimed", [(-1, 0), (0, 0), (1, 1), (10**6, 1)])
    def test_a_lease_that_ends_further_ahead_than_the_longest_lease_counts_as_expired(
        self, store: Store, clock: ManualClock, ahead_s: int, claimed: int
    ) -> None:
        receipt = submit(store)
        longest_s = LEASE_US_MAX // SECOND_US
        clock.advance(longest_s - LEASE_S + ahead_s)
        claim_one(store)

        clock.reboot("boot-1")  # the same boot id, and an uptime that restarts

        assert ids(claim(store)) == [receipt.id] * claimed


class RenewalPromises(StoreSuite):
    """`Store.renew`."""

    def test_a_renewed_lease_ends_so_much_from_now(self, store: Store, clock: ManualClock) -> None:
        submit(store)
        claimed = claim_one(store)
        clock.advance(20)

        assert store.renew([claimed.fence], lease_us=LEASE_US) == ([], [])

        clock.advance(LEASE_S - MICROSECOND)
        assert claim(store) == []
        clock.advance(MICROSECOND)
        assert len(claim(store)) == 1

    def test_a_lease_can_be_made_shorter(self, store: Store, clock: ManualClock) -> None:
        submit(store)
        claimed = claim_one(store)

        store.renew([claimed.fence], lease_us=SECOND_US)

        clock.advance(1)
        assert len(claim(store)) == 1

    def test_an_expired_lease_can_be_renewed_until_another_claim_takes_the_document(
        self, store: Store, clock: ManualClock
    ) -> None:
        submit(store)
        claimed = claim_one(store)
        clock.advance(LEASE_S + 1)

        assert store.renew([claimed.fence], lease_us=LEASE_US) == ([], [])

        assert claim(store) == []

    def test_an_attempt_loses_its_lease_when_another_claim_has_taken_the_document(
        self, store: Store, clock: ManualClock
    ) -> None:
        submit(store)
        first = claim_one(store)
        clock.advance(LEASE_S)
        second = claim_one(store)
        before = snapshot(store)

        renewed = store.renew([first.fence, second.fence], lease_us=LEASE_US)

        assert renewed == ([first.fence], [])
        assert snapshot(store) == before

    @pytest.mark.parametrize("ending", ["completed", "failed", "delayed", "released"])
    def test_an_attempt_that_ended_has_lost(self, store: Store, ending: str) -> None:
        submit(store)
        claimed = claim_one(store)
        match ending:
            case "completed":
                complete(store, [claimed])
            case "failed":
                fail(store, claimed)
            case "delayed":
                fail(store, claimed, retry_in_s=1)
            case "released":
                store.finish([Released(claimed.fence)])
        before = snapshot(store)

        assert store.renew([claimed.fence], lease_us=LEASE_US) == ([claimed.fence], [])

        assert snapshot(store) == before

    @pytest.mark.parametrize("id", ["", "no such document", "0" * 15, "f" * 15])
    def test_an_attempt_at_a_document_that_does_not_exist_has_lost(
        self, store: Store, id: str
    ) -> None:
        submit(store)
        claim_one(store)

        assert store.renew([Fence(id, 1)], lease_us=LEASE_US) == ([Fence(id, 1)], [])

    def test_a_renewal_reports_a_requested_cancel(self, store: Store, clock: ManualClock) -> None:
        submit_each(store, "ab")
        first, second = claim(store, 2)
        store.cancel([first.document.id])
        clock.advance(20)

        renewed = store.renew([first.fence, second.fence], lease_us=LEASE_US)

        assert renewed == ([], [first.fence])
        clock.advance(20)
        assert claim(store) == []
        assert state(store, first.document.id) is State.RUNNING

    def test_one_call_renews_what_it_can_and_names_the_rest(
        self, store: Store, clock: ManualClock
    ) -> None:
        submit_each(store, "abcd")
        claims = claim(store, 4)
        store.finish([Completed(claims[0].fence), Failed(claims[2].fence, "no")])
        fences = [claimed.fence for claimed in claims]
        clock.advance(20)

        assert store.renew(fences, lease_us=LEASE_US) == ([fences[0], fences[2]], [])

        clock.advance(20)
        assert claim(store) == []

    def test_renewing_nothing_changes_nothing(self, store: Store) -> None:
        make(store, State.RUNNING)
        before = snapshot(store)

        assert store.renew([], lease_us=LEASE_US) == ([], [])

        assert snapshot(store) == before

    def test_a_document_held_by_renewals_can_be_completed_long_after(
        self, store: Store, clock: ManualClock
    ) -> None:
        receipt = submit(store)
        claimed = claim_one(store)
        for _ in range(100):
            clock.advance(20)
            assert store.renew([claimed.fence], lease_us=LEASE_US) == ([], [])
            assert claim(store) == []

        complete(store, [claimed])

        found = document(store, receipt.id)
        assert (found.state, found.attempts) == (State.COMPLETED, 1)
