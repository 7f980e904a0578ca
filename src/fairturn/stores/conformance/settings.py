"""Settings of the queue: in force at once in every process; a new mode rebuilds the flows."""

from collections.abc import Sequence

import pytest

from fairturn.clock import SECOND_US, ManualClock
from fairturn.model import Document, Settings, State
from fairturn.priority import Reset
from fairturn.scheduling.flows import Costs, Mode
from fairturn.stores.conformance.steps import (
    START,
    adjust,
    all_customers,
    assert_numbers_are_exact,
    claim,
    claim_each,
    claim_one,
    complete,
    customers_of,
    document,
    fail,
    find_all,
    ids,
    new,
    snapshot,
    submit,
    submit_each,
)
from fairturn.stores.conformance.suite import OpenStore, StoreSuite
from fairturn.stores.contract import QueueStore as Store

OTHER = Settings(
    mode=Mode.LEVELS,
    costs=Costs.LEARNED,
    patience_s=0.25,
    reset=Reset.PERIODIC,
    reset_interval_s=60.5,
    bounds=(-1, -2, -3, -4, -5, -6, -7, -8),
    attempts_max=9,
    waiting_max=1_000,
    waiting_per_customer_max=100,
    completed_kept_s=1.5,
    cancelled_kept_s=2.5,
    dead_kept_s=3.5,
)
MODES = [(old, new) for old in Mode for new in Mode if old is not new]


class SettingsPromises(StoreSuite):
    """`Store.settings` and `Store.configure`."""

    def test_a_new_queue_has_the_settings_that_it_was_opened_with(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        assert open_store(clock=clock, settings=OTHER).settings() == OTHER
        assert open_store(clock=clock).settings() == Settings()

    def test_settings_are_in_force_when_the_call_returns(self, store: Store) -> None:
        store.configure(OTHER)

        assert store.settings() == OTHER
        assert store.settings().rule == OTHER.rule

    def test_other_bounds_hold_for_the_next_check_and_leave_the_others_alone(
        self, store: Store
    ) -> None:
        receipts = store.submit([new()] * 2)

        store.configure(Settings(bounds=(0, -1, -2, -3, -4, -5, -6, -7)))

        assert submit(store)[2:4] == (-2, 3)
        assert [document(store, id).priority for id in ids(receipts)] == [1, 1]
        assert_numbers_are_exact(store)

    def test_another_interval_and_reading_of_the_reset_hold_for_the_next_check(
        self, store: Store, clock: ManualClock
    ) -> None:
        for _ in range(3):
            submit(store)
            clock.advance(20)
        store.configure(Settings(reset=Reset.PERIODIC, reset_interval_s=50))
        assert submit(store).count == -3
        clock.advance(30)

        assert submit(store).count == -4  # the last update was 50 s ago
        clock.advance(1)
        assert submit(store).count == 0

    def test_other_attempts_hold_for_the_next_failure(self, store: Store) -> None:
        receipt = submit(store)
        fail(store, claim_one(store), retry_in_s=0)

        store.configure(Settings(attempts_max=2))
        fail(store, claim_one(store), retry_in_s=0)

        assert document(store, receipt.id).state is State.DEAD

    def test_another_patience_holds_for_the_next_claim(
        self, store: Store, clock: ManualClock
    ) -> None:
        submit_each(store, "oooo")
        complete(store, claim(store, 3))
        clock.advance(60)
        store.submit([new(f"n{n}") for n in range(20)])
        store.configure(Settings(patience_s=59))

        assert customers_of(claim(store, 8)) == "nnnnnnon"

    def test_other_costs_hold_for_the_next_claim(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        store = open_store(clock=clock, settings=Settings(mode=Mode.EQUAL))
        submit_each(store, "aaaa", cost=2_000_000)
        submit_each(store, "bbbbbb")
        assert customers_of(claim(store, 2)) == "ab"

        store.configure(Settings(mode=Mode.EQUAL, costs=Costs.KNOWN))

        assert customers_of(claim(store, 6)) == "abbabb"

    # ── Another mode ─────────────────────────────────────────────────────────────────────────────

    @pytest.mark.parametrize("old, mode", MODES)
    def test_in_another_mode_the_order_is_that_of_a_fresh_queue(
        self, open_store: OpenStore, clock: ManualClock, old: Mode, mode: Mode
    ) -> None:
        store = open_store(clock=clock, settings=Settings(mode=old))
        submit_each(store, "aaaaaabbbbccaaaadbbbbbbbbbbbbbbbbbbbbbbbbe")
        claims = claim(store, 7)
        complete(store, claims[:3])
        waiting = find_all(store)[::-1]
        waiting = [found for found in waiting if found.state is State.WAITING]

        store.configure(Settings(mode=mode))

        assert ids(claim_each(store)) == ids(in_turns(waiting, mode))

    @pytest.mark.parametrize("old, mode", MODES)
    def test_another_mode_leaves_priorities_counts_and_numbers_alone(
        self, open_store: OpenStore, clock: ManualClock, old: Mode, mode: Mode
    ) -> None:
        store = open_store(clock=clock, settings=Settings(mode=old))
        submit_each(store, "aaaaaabbbbc")
        submit_each(store, "dd", due_at=START + SECOND_US)
        fail(store, claim(store, 3)[0])
        before = snapshot(store)

        store.configure(Settings(mode=mode))

        assert snapshot(store) == before
        assert_numbers_are_exact(store)

    @pytest.mark.parametrize("old, mode", MODES)
    def test_the_road_goes_on_in_another_mode(
        self, open_store: OpenStore, clock: ManualClock, old: Mode, mode: Mode
    ) -> None:
        store = open_store(clock=clock, settings=Settings(mode=old))
        adjust(store, "a", limit=3)
        adjust(store, "b", paused=True)
        submit_each(store, "aaaaaaaabbcc")
        submit_each(store, "dd", due_at=START + SECOND_US)
        running = claim(store, 4)
        lease, dead, delayed, done = running

        store.configure(Settings(mode=mode))
        complete(store, [done])
        fail(store, dead)
        fail(store, delayed, retry_in_s=1)
        clock.advance(30)
        assert store.retry([dead.document.id]) == [State.DEAD]
        adjust(store, "b")
        adjust(store, "a")

        claims = claim(store, 100)
        assert lease.document.id in ids(claims)
        assert len(claims) == 13
        assert_numbers_are_exact(store)
        complete(store, claims)
        assert_numbers_are_exact(store)
        assert {found.state for found in find_all(store)} == {State.COMPLETED}

    def test_limits_and_pauses_hold_in_another_mode(self, store: Store) -> None:
        adjust(store, "a", limit=3)
        adjust(store, "b", paused=True)
        submit_each(store, "aaaaaabbc")
        assert customers_of(claim(store, 2)) == "ac"

        store.configure(Settings(mode=Mode.EQUAL))

        assert customers_of(claim(store, 9)) == "aa"

    def test_other_settings_in_the_same_mode_keep_the_turns(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        store = open_store(clock=clock, settings=Settings(mode=Mode.EQUAL))
        submit_each(store, "aaaabbbb")
        assert customers_of(claim(store)) == "a"

        store.configure(Settings(mode=Mode.EQUAL, attempts_max=2))

        assert customers_of(claim(store, 3)) == "bab"

    def test_a_document_that_is_retried_in_another_mode_waits_where_that_mode_wants_it(
        self, store: Store
    ) -> None:
        submit_each(store, "aaaa")
        fail(store, claim(store, 4)[-1])
        store.configure(Settings(mode=Mode.EQUAL))

        store.retry(ids(find_all(store)))

        assert_numbers_are_exact(store)
        assert [claimed.document.priority for claimed in claim(store, 9)] == [2]
        assert [found.running for found in all_customers(store)] == [4]


def in_turns(documents: Sequence[Document], mode: Mode) -> list[Document]:
    """Return the order of service if no customer has been served and all costs and weights are
    equal: in each round, the lowest document of every customer."""
    if mode is Mode.LEVELS:
        return sorted(documents, key=lambda found: (found.priority, found.order))
    rounds: list[tuple[int, int, int, Document]] = []
    turns: dict[tuple[int, str], list[Document]] = {}
    for found in sorted(documents, key=lambda found: found.order or 0):
        level = found.priority if mode is Mode.FAIR else 1
        turns.setdefault((level, found.customer), []).append(found)
    for place, ((level, _), own) in enumerate(turns.items()):
        rounds += [(level, n, place, found) for n, found in enumerate(own)]
    return [found for *_, found in sorted(rounds, key=lambda entry: entry[:3])]
