"""The version of a queue, and waiting for it to change."""

import threading
from collections.abc import Callable

import pytest

from fairturn.clock import ManualClock
from fairturn.model import Completed, Settings, State
from fairturn.scheduling.flows import Mode
from fairturn.stores.conformance.steps import (
    LEASE_S,
    adjust,
    claim,
    claim_one,
    complete,
    make,
    new,
    state,
    submit,
)
from fairturn.stores.conformance.suite import OpenStore, StoreSuite
from fairturn.stores.contract import QueueStore as Store

Change = Callable[[Store], object]

NEVER = -1  # not a version of any queue

CHANGES: dict[str, Change] = {
    "submit": submit,
    "claim": claim,
    "finish": lambda store: store.finish([Completed(claim_one(store).fence)]),
    "cancel": lambda store: store.cancel([submit(store).id]),
    "adjust": lambda store: adjust(store, "acme", weight=2),
    "configure": lambda store: store.configure(Settings(attempts_max=2)),
    "another mode": lambda store: store.configure(Settings(mode=Mode.EQUAL)),
    "purge": lambda store: store.purge("acme"),
}


class ChangePromises(StoreSuite):
    """`Store.version`, `Store.wait` and `Store.close`."""

    @pytest.mark.parametrize("change", CHANGES)
    def test_the_version_changes_with_every_change(self, store: Store, change: str) -> None:
        submit(store)
        before = store.version()

        CHANGES[change](store)

        assert store.version() != before

    def test_the_version_changes_when_outcomes_come_with_a_claim(self, store: Store) -> None:
        submit(store)
        claimed = claim_one(store)
        before = store.version()

        assert claim(store, outcomes=[Completed(claimed.fence)]) == []

        assert store.version() != before

    def test_the_version_changes_when_a_dead_document_waits_again(self, store: Store) -> None:
        id = make(store, State.DEAD)
        before = store.version()

        store.retry([id])

        assert store.version() != before

    def test_the_version_changes_when_a_claim_only_ends_leases(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        store = open_store(clock=clock, settings=Settings(attempts_max=1))
        receipt = submit(store)
        claim_one(store)
        clock.advance(LEASE_S)
        before = store.version()

        assert claim(store) == []

        assert state(store, receipt.id) is State.DEAD
        assert store.version() != before

    def test_the_version_changes_when_documents_are_forgotten(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        store = open_store(clock=clock, settings=Settings(completed_kept_s=0))
        submit(store)
        complete(store, claim(store))
        clock.advance(1)
        before = store.version()

        assert store.prune() is not None

        assert store.version() != before

    def test_versions_never_come_again(self, store: Store) -> None:
        seen = [store.version()]
        for _ in range(5):
            for change in CHANGES.values():
                submit(store)
                change(store)
                seen.append(store.version())

        assert len(set(seen)) == len(seen)

    def test_waiting_for_another_version_returns_at_once_when_it_is_there(
        self, store: Store
    ) -> None:
        before = store.version()
        submit(store)

        assert store.wait(before, 3_600) == store.version() != before

    def test_an_uncertain_wait_returns_at_once_after_an_earlier_change(self, store: Store) -> None:
        before = store.wait(NEVER, 3_600, certain=False)
        submit(store)

        assert store.wait(before, 3_600, certain=False) != before

    @pytest.mark.parametrize("timeout_s", [0, -1, 0.03])
    def test_waiting_ends_when_the_time_is_over(self, store: Store, timeout_s: float) -> None:
        submit(store)
        version = store.version()

        assert store.wait(version, timeout_s) == version

    @pytest.mark.parametrize("certain", [True, False])
    @pytest.mark.parametrize("change", CHANGES)
    def test_a_change_of_another_thread_wakes_all_waiting_threads(
        self, store: Store, change: str, certain: bool
    ) -> None:
        submit(store)
        version = store.version() if certain else store.wait(NEVER, 0, certain=False)
        woken: list[int] = []
        threads = [
            threading.Thread(
                target=lambda: woken.append(store.wait(version, 60, certain=certain)), daemon=True
            )
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()

        CHANGES[change](store)

        for thread in threads:
            thread.join(timeout=10)
        assert len(woken) == 3
        assert version not in woken

    def test_a_store_can_be_closed_twice(self, store: Store) -> None:
        store.submit([new()])

        store.close()
        store.close()
