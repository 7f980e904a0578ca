"""The result of a claim, and the effect of customers' settings and costs on the order."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from fairturn.clock import SECOND_US, ManualClock
from fairturn.model import Claim, Completed, Released, Settings, State
from fairturn.scheduling.flows import COST_ONE, Costs, Mode
from fairturn.stores.conformance.steps import (
    LEASE_S,
    LEASE_US,
    START,
    adjust,
    assert_numbers_are_exact,
    claim,
    claim_each,
    claim_one,
    complete,
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

EQUAL = Settings(mode=Mode.EQUAL)

Prepare = Callable[[Store], object]
Change = Callable[[Store, ManualClock, Any], object]


def _limited(store: Store) -> Claim:
    """Claim a document, and let another one wait for the limit of their customer."""
    adjust(store, "acme", limit=1)
    submit_each(store, ["acme", "acme"])
    return claim_one(store)


def _paused(store: Store) -> None:
    adjust(store, "acme", paused=True)
    submit(store)


# A state with nothing to claim, and a change that makes one document claimable.
NOTHING_UNTIL: dict[str, tuple[Prepare, Change]] = {
    "it is submitted": (lambda store: None, lambda store, clock, _: submit(store)),
    "it is due": (
        lambda store: make(store, State.DELAYED),
        lambda store, clock, _: clock.advance(3_600),
    ),
    "its lease ends": (
        lambda store: make(store, State.RUNNING),
        lambda store, clock, _: clock.advance(LEASE_S),
    ),
    "it is given back": (
        lambda store: (submit(store), claim_one(store))[1],
        lambda store, clock, claimed: store.finish([Released(claimed.fence)]),
    ),
    "it is tried again": (
        lambda store: make(store, State.DEAD),
        lambda store, clock, id: store.retry([id]),
    ),
    "its customer's pause ends": (
        _paused,
        lambda store, clock, _: adjust(store, "acme", paused=False),
    ),
    "its customer's limit is raised": (
        _limited,
        lambda store, clock, _: adjust(store, "acme", limit=2),
    ),
    "another one makes room": (
        _limited,
        lambda store, clock, claimed: complete(store, [claimed]),
    ),
}


class ClaimPromises(StoreSuite):
    """`Store.claim`: its result."""

    def test_a_claim_gives_the_document_with_its_body_until_the_lease_ends(
        self, store: Store, clock: ManualClock
    ) -> None:
        receipt = submit(store, body="[1]", name="one.json")
        clock.advance(5)

        claimed = claim_one(store, worker="worker \u2116 7", lease_us=1_500_000)

        now = START + 5 * SECOND_US
        assert (claimed.body, claimed.lease_ends_at_us) == ("[1]", now + 1_500_000)
        assert claimed.fence.document == receipt.id
        assert claimed.document == document(store, receipt.id)
        assert (claimed.document.state, claimed.document.attempts) == (State.RUNNING, 1)
        assert (claimed.document.worker, claimed.document.claimed_at_us) == ("worker \u2116 7", now)
        assert claimed.document.name == "one.json"

    def test_a_running_document_is_not_claimed_again(self, store: Store) -> None:
        submit(store)
        claim_one(store)

        assert claim(store) == []

    def test_fewer_than_asked_for_are_given_only_if_nothing_else_may_be_claimed(
        self, store: Store
    ) -> None:
        store.submit([new(f"customer {n % 3}") for n in range(50)])

        assert [len(claim(store, n)) for n in (1, 0, 20, 100, 100)] == [1, 0, 20, 29, 0]

    @pytest.mark.parametrize("until", NOTHING_UNTIL)
    def test_claims_that_find_nothing_are_followed_by_one_that_gives_what_may_be_claimed_then(
        self, store: Store, clock: ManualClock, until: str
    ) -> None:
        prepare, change = NOTHING_UNTIL[until]
        prepared = prepare(store)
        found = [claim(store) for _ in range(3)]

        change(store, clock, prepared)

        assert found == [[], [], []]
        claim_one(store)
        assert_numbers_are_exact(store)

    def test_a_claim_in_an_empty_queue_gives_nothing_and_changes_nothing(
        self, store: Store
    ) -> None:
        before = snapshot(store)

        assert store.claim(10, worker="w", lease_us=LEASE_US) == ([], [], [])

        assert snapshot(store) == before

    def test_every_attempt_has_a_higher_fence_and_counts_as_an_attempt(
        self, store: Store, clock: ManualClock
    ) -> None:
        submit(store)

        attempts = []
        for ending in ["failed", "lease", "failed", "dead"]:
            claimed = claim_one(store)
            attempts.append((claimed.fence.number, claimed.document.attempts))
            if ending == "lease":
                clock.advance(30)
            else:
                fail(store, claimed, retry_in_s=0 if ending == "failed" else None)
        store.retry([claimed.fence.document])
        claimed = claim_one(store)
        attempts.append((claimed.fence.number, claimed.document.attempts))

        fences = [fence for fence, _ in attempts]
        assert fences == sorted(set(fences))
        assert [attempt for _, attempt in attempts] == [1, 2, 3, 4, 1]

    def test_threads_that_claim_at_once_never_get_the_same_document(self, store: Store) -> None:
        store.submit([new(f"customer {n % 5}") for n in range(60)])
        claimed: list[str] = []
        start = threading.Barrier(6)

        def claim_some() -> None:
            start.wait()
            for _ in range(5):
                claimed.extend(ids(claim(store, 2)))

        threads = [threading.Thread(target=claim_some) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert len(claimed) == len(set(claimed)) == 60

    def test_outcomes_are_recorded_before_the_claim_decides(self, store: Store) -> None:
        adjust(store, "acme", limit=1)
        first, second = store.submit([new(), new()])
        running = claim_one(store)
        assert claim(store) == []

        following = claim_one(store, outcomes=[Completed(running.fence)])

        assert (running.document.id, following.document.id) == (first.id, second.id)
        assert state(store, first.id) is State.COMPLETED

    def test_a_claim_of_none_records_outcomes(self, store: Store) -> None:
        receipt = submit(store)
        running = claim_one(store)

        claimed = store.claim(0, worker="w", lease_us=1, outcomes=[Completed(running.fence)])

        assert claimed == ([], [], [])
        assert state(store, receipt.id) is State.COMPLETED

    @pytest.mark.parametrize("mode", list(Mode))
    def test_a_claim_of_many_is_as_many_claims_one_after_the_other(
        self, open_store: OpenStore, clock: ManualClock, mode: Mode
    ) -> None:
        stores = [open_store(clock=clock, settings=Settings(mode=mode)) for _ in range(2)]
        for store in stores:
            adjust(store, "a", weight=2)
            adjust(store, "b", limit=7)
            submit_each(store, "aabcaabcaabdaaecaabcadbc" * 2)
        clock.advance(121)

        at_once, one_by_one = claim(stores[0], 100), claim_each(stores[1])

        orders = [[c.document.order for c in claims] for claims in (at_once, one_by_one)]
        assert len(orders[0]) == 48 - 3
        assert orders[0] == orders[1]


class TurnPromises(StoreSuite):
    """`Store.adjust` and costs: the effect of a weight, limit, pause or cost on claims."""

    def test_turns_are_proportional_to_weights(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        store = open_store(clock=clock, settings=EQUAL)
        adjust(store, "a", weight=2)
        submit_each(store, "aaaaaabbb")

        assert customers_of(claim_each(store)) == "abaabaaba"

    def test_a_weight_counts_from_the_next_charge_on(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        store = open_store(clock=clock, settings=EQUAL)
        submit_each(store, "aaaaaaaabbbbbbbb")
        assert customers_of(claim(store, 4)) == "abab"

        adjust(store, "a", weight=2)

        assert customers_of(claim(store, 6)) == "abaaba"

    def test_a_limit_is_exact(self, store: Store, clock: ManualClock) -> None:
        adjust(store, "a", limit=2)
        submit_each(store, "aaaaaab")

        first = claim(store, 10)
        assert customers_of(first) == "aba"
        assert claim(store, 10) == []

        complete(store, first[:1])
        second = claim(store, 10)
        assert customers_of(second) == "a"
        fail(store, second[0], retry_in_s=5)
        assert customers_of(claim(store, 10)) == "a"
        clock.advance(5)
        assert claim(store, 10) == []
        clock.advance(25)  # the leases expire
        assert customers_of(claim(store, 10)) in ("aab", "aba", "baa")

    def test_a_limit_holds_inside_one_claim_and_costs_the_others_nothing(
        self, store: Store
    ) -> None:
        adjust(store, "a", limit=1)
        submit_each(store, "aaaaaaaaabc")

        assert sorted(customers_of(claim(store, 3))) == ["a", "b", "c"]

    def test_a_limit_holds_over_all_levels_of_a_customer(self, store: Store) -> None:
        adjust(store, "a", limit=4)
        submit_each(store, "a" * 30)

        assert len(claim(store, 30)) == 4

    def test_another_limit_counts_from_the_next_claim_on(self, store: Store) -> None:
        submit_each(store, "aaaaaa")
        running = claim(store, 3)

        adjust(store, "a", limit=2)
        assert claim(store) == []
        complete(store, running[:1])
        assert claim(store) == []
        complete(store, running[1:2])
        assert len(claim(store, 6)) == 1

        adjust(store, "a")
        assert len(claim(store, 6)) == 2

    def test_a_paused_customer_gets_no_claims_until_the_pause_ends(self, store: Store) -> None:
        submit_each(store, "aab")
        adjust(store, "a", paused=True)
        submit(store, "a")

        assert customers_of(claim(store, 10)) == "b"

        adjust(store, "a", paused=False)
        assert customers_of(claim(store, 10)) == "aaa"

    def test_a_pause_leaves_running_documents_alone(self, store: Store) -> None:
        submit(store)
        running = claim_one(store)

        adjust(store, "acme", paused=True)

        assert store.renew([running.fence], lease_us=LEASE_US) == ([], [])
        complete(store, [running])
        assert state(store, running.document.id) is State.COMPLETED

    def test_a_pause_gives_no_credit(self, open_store: OpenStore, clock: ManualClock) -> None:
        store = open_store(clock=clock, settings=EQUAL)
        submit_each(store, "aaaaaaaabbbbbbbb")
        adjust(store, "b", paused=True)
        assert customers_of(claim(store, 4)) == "aaaa"

        adjust(store, "b")

        assert customers_of(claim(store, 6)) == "ababab"

    def test_a_limit_gives_no_credit(self, open_store: OpenStore, clock: ManualClock) -> None:
        store = open_store(clock=clock, settings=EQUAL)
        adjust(store, "b", limit=1)
        submit_each(store, "baaaaaaaabbb")
        assert customers_of(claim(store, 5)) == "baaaa"

        adjust(store, "b")

        assert customers_of(claim(store, 6)) == "ababab"

    def test_settings_of_a_customer_hold_before_its_first_document(self, store: Store) -> None:
        adjust(store, "a", paused=True)

        submit_each(store, "ab")

        assert customers_of(claim(store, 10)) == "b"

    def test_known_costs_are_charged(self, open_store: OpenStore, clock: ManualClock) -> None:
        settings = Settings(mode=Mode.EQUAL, costs=Costs.KNOWN)
        store = open_store(clock=clock, settings=settings)
        submit_each(store, "aaa", cost=3 * COST_ONE)
        submit_each(store, "bbbbbbb")

        assert customers_of(claim_each(store)) == "abbbabbbab"

    def test_submitted_costs_do_not_count_where_all_costs_are_equal(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        store = open_store(clock=clock, settings=EQUAL)
        submit_each(store, "aaa", cost=3 * COST_ONE)
        submit_each(store, "bbb")

        assert customers_of(claim_each(store)) == "ababab"

    @pytest.mark.parametrize("told", [True, False])
    def test_real_costs_are_learned_from_finished_documents(
        self, open_store: OpenStore, clock: ManualClock, told: bool
    ) -> None:
        settings = Settings(mode=Mode.EQUAL, costs=Costs.LEARNED)
        store = open_store(clock=clock, settings=settings)
        submit_each(store, "aaaabbbbbbbb")

        order = ""
        outcomes: list[Completed] = []
        while claims := claim(store, outcomes=outcomes):
            (claimed,) = claims
            order += claimed.document.customer
            seconds = 3 if claimed.document.customer == "a" else 1
            clock.advance(0 if told else seconds)
            outcomes = [
                Completed(claimed.fence, real_cost=seconds * COST_ONE if told else None),
            ]

        assert order == "abbbabbbabba"

    def test_numbers_are_exact_through_limits_and_pauses(self, store: Store) -> None:
        submit_each(store, "aaaabbbb")
        for settings in ({"limit": 1}, {"paused": True}, {"weight": 3.0}, {}):
            adjust(store, "a", **settings)
            running = claim(store, 2)
            assert_numbers_are_exact(store)
            complete(store, running)
            assert_numbers_are_exact(store)
