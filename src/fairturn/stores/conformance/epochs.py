"""Epochs: after `begin_epoch`, earlier numbers and fences are never reused."""

from fairturn.clock import ManualClock
from fairturn.model import Completed, Filter, State
from fairturn.stores.conformance.steps import (
    LEASE_S,
    assert_numbers_are_exact,
    claim,
    claim_one,
    complete,
    document,
    ids,
    new,
    snapshot,
    state,
    submit,
    submit_each,
)
from fairturn.stores.conformance.suite import StoreSuite
from fairturn.stores.contract import QueueStore as Store
from fairturn.stores.values import JUMP_MIN


class EpochPromises(StoreSuite):
    """`Store.begin_epoch`."""

    def test_after_a_new_epoch_no_id_and_no_fence_comes_again(
        self, store: Store, clock: ManualClock
    ) -> None:
        numbers: list[int] = []
        fences: list[int] = []
        for _ in range(3):
            submit(store, due_at=clock.now() + 1)  # its order is assigned when it becomes due
            submitted = submit_each(store, "abc")
            clock.advance(1)
            claims = claim(store, 2) + claim(store, 2)
            orders = [claimed.document.order or 0 for claimed in claims]
            assert min(orders) > max(numbers, default=0) + JUMP_MIN * bool(numbers)
            assert claims[0].fence.number > max(fences, default=0) + JUMP_MIN * bool(fences)
            assert {receipt.id for receipt in submitted} <= set(ids(claims))
            numbers += orders
            fences += [claimed.fence.number for claimed in claims]
            complete(store, claims)

            store.begin_epoch()

        assert len(set(numbers)) == 12
        assert len(set(fences)) == 6

    def test_a_new_epoch_changes_nothing_that_is_there(
        self, store: Store, clock: ManualClock
    ) -> None:
        submit_each(store, "aab", key=None)
        submit(store, due_at=clock.now() + 60_000_000)
        claimed = claim_one(store)
        before = snapshot(store)

        store.begin_epoch()

        assert snapshot(store) == before
        assert store.renew([claimed.fence], lease_us=60_000_000) == ([], [])
        complete(store, [claimed])
        assert state(store, claimed.document.id) is State.COMPLETED
        assert_numbers_are_exact(store)

    def test_a_look_with_a_reach_passes_the_gap_that_an_epoch_leaves(self, store: Store) -> None:
        submitted = submit_each(store, "abc")
        store.begin_epoch()
        submitted += submit_each(store, "de")

        first = store.find(Filter(), reach=2)
        second = store.find(Filter(), after=first.next, reach=2)
        third = store.find(Filter(), after=second.next, reach=2)

        found = ids([*first.documents, *second.documents, *third.documents])
        assert found == [receipt.id for receipt in reversed(submitted)]
        assert third.next is None

    def test_the_order_goes_on_through_a_new_epoch(self, store: Store, clock: ManualClock) -> None:
        before = submit_each(store, "abc")
        late = claim_one(store)
        store.begin_epoch()
        after = store.submit([new("a"), new("d")])
        clock.advance(LEASE_S)

        claims = claim(store, 9)

        assert set(ids(claims)) == {receipt.id for receipt in [*before, *after]}
        for first, second in (before[0].id, after[0].id), (before[2].id, after[1].id):
            assert ids(claims).index(first) < ids(claims).index(second)
        assert store.finish([Completed(late.fence)]) == [late.fence]
        assert document(store, late.document.id).attempts == 2
