"""The order of service: the vectors through the store, levels, turns, and the longest waiting."""

from collections.abc import Iterable
from dataclasses import replace
from heapq import heappop, heappush

import pytest

from fairturn.clock import SECOND_US, ManualClock
from fairturn.model import LEASE_US_MAX, Claim, Completed, Settings
from fairturn.scheduling.flows import Mode
from fairturn.stores.conformance.steps import (
    adjust,
    claim,
    claim_each,
    complete,
    customers_of,
    ids,
    new,
    submit,
    submit_each,
)
from fairturn.stores.conformance.suite import OpenStore, StoreSuite
from fairturn.stores.conformance.vectors import ArrivalVector, OrderCase, ServiceVector
from fairturn.stores.contract import QueueStore as Store


class OrderPromises(StoreSuite):
    """`Store.claim`: the order of service."""

    def test_a_trace_of_the_vectors_is_served_exactly_as_they_say(
        self, open_store: OpenStore, order_case: OrderCase
    ) -> None:
        clock = ManualClock()
        store = open_store(clock=clock, settings=Settings(mode=order_case.mode))

        served = serve(store, clock, order_case.arrivals, order_case.workers)

        assert served == list(order_case.served)

    def test_levels_are_served_by_priority_and_then_by_submission(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        store = open_store(clock=clock, settings=Settings(mode=Mode.LEVELS))
        receipts = store.submit([new(name) for name in "ababaaa" + "ba" * 15])

        expected = sorted(receipts, key=lambda receipt: receipt.priority)

        assert ids(claim_each(store)) == ids(expected)

    def test_customers_take_turns_inside_a_level(self, store: Store) -> None:
        submit_each(store, "aaaaabbbbbccccc")  # three of each in level 1, two in level 2

        assert customers_of(claim_each(store)) == "abcabcabc" + "abcabc"

    def test_many_customers_that_arrive_at_once_take_turns(self, store: Store) -> None:
        names = [f"customer {n}" for n in range(150)]
        store.submit([new(name) for name in names * 2])

        claims = [claimed for _ in range(101) for claimed in claim(store, 3)]

        assert [claimed.document.customer for claimed in claims] == names * 2

    def test_mode_equal_puts_all_customers_in_one_level(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        store = open_store(clock=clock, settings=Settings(mode=Mode.EQUAL))
        submit_each(store, "a" * 30 + "b" * 3)

        claims = claim_each(store)

        assert customers_of(claims) == "ababab" + "a" * 27
        assert [c.document.priority for c in claims if c.document.customer == "a"][-1] == 9

    def test_a_newcomer_has_a_turn_at_once_and_no_credit(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        store = open_store(clock=clock, settings=Settings(mode=Mode.EQUAL))
        submit_each(store, "a" * 20)
        claim(store, 8)

        submit_each(store, "bbbbbb")

        assert customers_of(claim(store, 8)) == "abababab"

    def test_a_customer_that_was_served_beyond_its_share_does_not_start_anew(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        store = open_store(clock=clock, settings=Settings(mode=Mode.EQUAL))
        adjust(store, "b", weight=0.1)
        submit_each(store, "baaaaaaaaaaaaaaaaaaaa")
        claims = claim(store, 3)  # one of b, at the cost of ten turns
        complete(store, claims)

        submit_each(store, "bb")

        assert customers_of(claims) == "baa"
        assert customers_of(claim(store, 10)) == "a" * 9 + "b"

    def test_cancelled_documents_cost_their_customer_nothing(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        store = open_store(clock=clock, settings=Settings(mode=Mode.EQUAL))
        receipts = submit_each(store, "a" * 100)
        submit_each(store, "bb")
        store.cancel(ids(receipts[:98]))

        assert customers_of(claim_each(store)) == "abab"

    # ── The longest waiting ──────────────────────────────────────────────────────────────────────

    @pytest.mark.parametrize(
        "mode, waited_us, tenth",
        [
            (Mode.FAIR, 120 * SECOND_US + 1, "o"),
            (Mode.FAIR, 120 * SECOND_US, "n"),
            (Mode.LEVELS, 500 * SECOND_US, "n"),
        ],
    )
    def test_the_tenth_claim_goes_to_a_customer_that_waits_longer_than_the_patience(
        self, open_store: OpenStore, clock: ManualClock, mode: Mode, waited_us: int, tenth: str
    ) -> None:
        store = open_store(clock=clock, settings=Settings(mode=mode))
        submit_each(store, "oooo")
        complete(store, claim(store, 3))
        leave_one_behind(store, clock, waited_us)

        assert customers_of(claim(store, 10)) == "nnnnnn" + tenth + "nnn"

    def test_a_held_customer_is_passed_over_however_long_it_waits(
        self, store: Store, clock: ManualClock
    ) -> None:
        submit_each(store, "oooo")
        complete(store, claim(store, 3))
        adjust(store, "o", paused=True)
        leave_one_behind(store, clock, 500 * SECOND_US)

        assert customers_of(claim(store, 12)) == "n" * 12

    def test_the_longest_waiting_have_their_turns_by_how_long_they_wait(
        self, store: Store, clock: ManualClock
    ) -> None:
        for name in "pq":
            submit_each(store, name * 4)
            complete(store, claim(store, 3))
            clock.advance(1)
        leave_one_behind(store, clock, 500 * SECOND_US, newcomers=30)

        order = customers_of(claim(store, 24))

        assert order == "nnn" + "p" + "n" * 9 + "q" + "n" * 10

    def test_a_turn_for_the_longest_waiting_is_not_charged(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        store = open_store(clock=clock, settings=Settings(mode=Mode.EQUAL, patience_s=0))
        submit_each(store, "a" * 12)
        complete(store, claim(store, 9))
        submit_each(store, "bbb")
        clock.advance(1)
        assert customers_of(claim(store)) == "a"  # the tenth

        assert customers_of(claim(store, 4)) == "abab"

    def test_claims_are_numbered_for_the_whole_life_of_the_queue(
        self, store: Store, clock: ManualClock
    ) -> None:
        submit_each(store, "oooo")
        complete(store, claim(store, 3))
        leave_one_behind(store, clock, 500 * SECOND_US)
        for _ in range(20):
            store.claim(0, worker="w", lease_us=1)

        order = "".join(customers_of(claim(store, n)) for n in (1, 3, 2, 1, 3))

        assert order == "nnnnnn" + "o" + "nnn"


def leave_one_behind(store: Store, clock: ManualClock, waited_us: int, newcomers: int = 20) -> None:
    """Advance the clock by `waited_us`, then submit for new customers, named n0, n1, ..."""
    clock.set(clock.now() + waited_us)
    for n in range(newcomers):
        submit(store, f"n{n}")


def serve(
    store: Store, clock: ManualClock, arrivals: Iterable[ArrivalVector], workers: int
) -> list[ServiceVector]:
    """Serve a trace. At equal times documents finish first, then others arrive, then workers
    claim."""
    coming = list(enumerate(arrivals))[::-1]
    numbers: dict[str, int] = {}
    claims: dict[int, Claim] = {}
    running: list[tuple[int, int]] = []  # a heap of (finish, number)
    served = [ServiceVector(0, 0, 0, 0)] * len(coming)
    costs = [arrival.cost for _, arrival in reversed(coming)]
    while coming or running:
        now = min([at for at, _ in running[:1]] + [arrival.at for _, arrival in coming[-1:]])
        clock.set(now)
        finished = []
        while running and running[0][0] == now:
            finished.append(heappop(running)[1])
        if finished:
            outcomes = [Completed(claims[n].fence, real_cost=costs[n]) for n in finished]
            assert store.finish(outcomes) == []
        for n in finished:
            served[n] = replace(served[n], finished_at=now)
        while coming and coming[-1][1].at == now:
            n, arrival = coming.pop()
            if arrival.weight is not None:
                adjust(store, arrival.customer, weight=arrival.weight)
            receipt = submit(store, arrival.customer, cost=arrival.cost)
            numbers[receipt.id] = n
            served[n] = ServiceVector(receipt.count, receipt.priority, 0, 0)
        for claimed in claim(store, workers - len(running), lease_us=LEASE_US_MAX):
            n = numbers[claimed.document.id]
            claims[n] = claimed
            served[n] = replace(served[n], started_at=now)
            heappush(running, (now + costs[n], n))
    return served
