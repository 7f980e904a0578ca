"""The progress that a handler reports."""

from fairturn.clock import ManualClock
from fairturn.model import Progress
from fairturn.stores.conformance.steps import (
    LEASE_S,
    LEASE_US,
    claim,
    claim_one,
    document,
    fail,
    find_all,
    submit,
    submit_each,
)
from fairturn.stores.conformance.suite import StoreSuite
from fairturn.stores.contract import QueueStore as Store


class ProgressPromises(StoreSuite):
    """`Store.renew` with `progress`."""

    def test_progress_is_kept_as_it_was_said(self, store: Store) -> None:
        a, b, c = submit_each(store, "abc")
        first, second, third = claim(store, 3)
        said = {first.fence: Progress(3, 10), second.fence: Progress(0.5)}

        store.renew([first.fence, second.fence, third.fence], lease_us=LEASE_US, progress=said)

        kept = [document(store, one.id).progress for one in (a, b, c)]
        assert kept == [Progress(3, 10), Progress(0.5), None]
        assert [type(value) for value in kept[0] or ()] == [int, int]
        assert {found.progress for found in find_all(store)} == set(kept)

    def test_a_renewal_without_progress_keeps_the_progress(self, store: Store) -> None:
        receipt = submit(store)
        claimed = claim_one(store)
        store.renew([claimed.fence], lease_us=LEASE_US, progress={claimed.fence: Progress(1)})

        store.renew([claimed.fence], lease_us=LEASE_US)

        assert document(store, receipt.id).progress == Progress(1)

    def test_progress_outlives_the_end_and_not_the_next_claim(self, store: Store) -> None:
        receipt = submit(store)
        claimed = claim_one(store)
        store.renew([claimed.fence], lease_us=LEASE_US, progress={claimed.fence: Progress(1)})

        fail(store, claimed, retry_in_s=0)
        between = document(store, receipt.id).progress
        again = claim_one(store)

        assert (between, again.document.progress) == (Progress(1), None)
        assert document(store, receipt.id).progress is None

    def test_an_attempt_that_was_overtaken_cannot_say_how_far_it_is(
        self, store: Store, clock: ManualClock
    ) -> None:
        receipt = submit(store)
        late = claim_one(store)
        clock.advance(LEASE_S)
        claim_one(store)

        renewed = store.renew([late.fence], lease_us=LEASE_US, progress={late.fence: Progress(9)})

        assert renewed == ([late.fence], [])
        assert document(store, receipt.id).progress is None

    def test_progress_of_an_attempt_that_is_not_renewed_is_not_kept(self, store: Store) -> None:
        a, b = submit_each(store, "ab")
        first, second = claim(store, 2)

        store.renew([first.fence], lease_us=LEASE_US, progress={second.fence: Progress(9)})

        assert [document(store, one.id).progress for one in (a, b)] == [None, None]
