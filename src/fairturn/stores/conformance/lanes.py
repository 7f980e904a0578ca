"""Lanes: the next documents of each priority, compared with later claims."""

import pytest

from fairturn.clock import ManualClock
from fairturn.model import Settings, State
from fairturn.priority import LEVELS
from fairturn.scheduling.flows import Costs, Mode
from fairturn.stores.conformance.steps import (
    LEASE_S,
    adjust,
    claim,
    claim_each,
    complete,
    fail,
    ids,
    snapshot,
    submit,
    submit_each,
)
from fairturn.stores.conformance.suite import OpenStore, StoreSuite
from fairturn.stores.contract import QueueStore as Store


def lanes(store: Store, size: int = 100) -> list[list[str]]:
    return [ids(lane) for lane in store.lanes(size=size).upcoming]


def claimed_by_priority(store: Store) -> list[list[str]]:
    """Claim all documents and return their ids by priority."""
    taken: list[list[str]] = [[] for _ in range(LEVELS)]
    for each in claim_each(store):
        taken[each.document.priority - 1].append(each.document.id)
    return taken


class LanePromises(StoreSuite):
    """`Store.lanes`."""

    def test_an_empty_queue_has_nine_empty_lanes(self, store: Store) -> None:
        assert store.lanes() == (0, ((),) * LEVELS)

    @pytest.mark.parametrize("mode", list(Mode))
    @pytest.mark.parametrize("costs", [Costs.EQUAL, Costs.KNOWN])
    def test_lanes_are_what_claims_will_take(
        self, open_store: OpenStore, clock: ManualClock, mode: Mode, costs: Costs
    ) -> None:
        store = open_store(clock=clock, settings=Settings(mode=mode, costs=costs))
        submit_each(store, "aaaaaaaaaabbbbbcd" * 2, cost=2_000_000)
        adjust(store, "b", weight=2.0)
        complete(store, claim(store, 5))
        submit_each(store, "cdaeb", cost=1_000_000)

        before = lanes(store)

        assert before == claimed_by_priority(store)

    def test_each_lane_has_at_most_size_documents(self, store: Store) -> None:
        submit_each(store, "aaaaaaaabbbbbbbb")

        whole, some = lanes(store), lanes(store, 2)

        assert some == [lane[:2] for lane in whole]

    def test_what_was_returned_comes_first_again(self, store: Store, clock: ManualClock) -> None:
        submit_each(store, "aaab")
        first, *_ = claim(store, 3)
        fail(store, first, retry_in_s=0.5)
        clock.advance(1)
        claim(store, 0)

        assert lanes(store)[0][0] == first.document.id
        assert lanes(store) == claimed_by_priority(store)

    def test_customers_that_are_paused_or_at_their_limit_are_not_next(self, store: Store) -> None:
        submit_each(store, "aabbc")
        adjust(store, "a", paused=True)
        adjust(store, "b", limit=1)
        claim(store, 1)

        assert lanes(store) == claimed_by_priority(store)
        assert all(document.customer != "a" for lane in store.lanes()[1] for document in lane)

    def test_the_documents_are_whole_and_wait(self, store: Store) -> None:
        receipt = submit(store, "acme", name="one.pdf")

        ((document, *_), *_) = store.lanes().upcoming

        assert (document.id, document.name, document.state) == (
            receipt.id,
            "one.pdf",
            State.WAITING,
        )

    def test_every_attempt_that_begins_is_counted(self, store: Store, clock: ManualClock) -> None:
        submit_each(store, "aab")
        claim(store, 2)
        assert store.lanes().started == 2

        clock.advance(LEASE_S + 1)
        claim_each(store)

        assert store.lanes().started == 5

    def test_asking_for_lanes_changes_nothing(self, store: Store) -> None:
        submit_each(store, "aabb")
        claim(store, 1)
        submit_each(store, "cc")
        before = snapshot(store)

        store.lanes()

        assert snapshot(store) == before
