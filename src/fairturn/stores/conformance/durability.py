"""Stores that outlive their process: the state that another process reads."""

import threading

import pytest

from fairturn.clock import ManualClock
from fairturn.model import (
    Advanced,
    Completed,
    ContentRef,
    Failed,
    KindSettings,
    Released,
    Settings,
    State,
)
from fairturn.scheduling.flows import Costs, Mode
from fairturn.stores.conformance.steps import (
    LEASE_S,
    LEASE_US,
    START,
    adjust,
    claim,
    claim_one,
    complete,
    customers_of,
    find_all,
    ids,
    make,
    new,
    snapshot,
    state,
    submit,
    submit_each,
)
from fairturn.stores.conformance.suite import OpenAgain, OpenStore, StoreSuite
from fairturn.stores.contract import QueueStore as Store
from fairturn.stores.values import JUMP_MIN

FILE = ContentRef("aa/step", 12, b"\x05" * 32)


class DurabilityPromises(StoreSuite):
    """A `Store` that is opened again, by the fixture `open_again`."""

    @pytest.fixture
    def open_again(self) -> OpenAgain:
        """Override this: return a function that opens the queue of a store once more."""
        raise NotImplementedError(f"{type(self).__name__} has no fixture open_again: define one")

    def test_steps_attempts_checkpoints_and_expiries_are_there_when_a_store_is_opened_again(
        self, kinds: Store, clock: ManualClock, open_again: OpenAgain
    ) -> None:
        kinds.configure_kind("ocr", KindSettings(expires_in_s=60))
        id = submit(kinds).id
        kinds.finish([Failed(claim_one(kinds).fence, "unreadable", 0, "Traceback")])
        kinds.finish([Advanced(claim_one(kinds).fence, "text", "1", FILE, 2_000_000)])
        second = claim_one(kinds)
        kinds.renew([second.fence], lease_us=LEASE_US, checkpoints={second.fence: "7"})
        kinds.finish([Released(second.fence)])
        expiring = submit(kinds, kind="ocr").id
        before = snapshot(kinds), kinds.attempts(id, values=True), kinds.kinds()
        kinds.close()

        again = open_again(kinds, clock=clock)

        assert (snapshot(again), again.attempts(id, values=True), again.kinds()) == before
        third = claim_one(again, kinds=["text"])
        assert (third.previous, third.previous_content, third.checkpoint) == ("1", FILE, "7")
        assert third.steps == second.steps
        clock.advance(60)
        assert claim(again, kinds=["ocr"]) == []
        assert state(again, expiring) is State.EXPIRED

    def test_everything_is_there_when_a_store_is_opened_again(
        self, store: Store, clock: ManualClock, open_again: OpenAgain
    ) -> None:
        adjust(store, "a", weight=2, limit=7)
        submit(store, "a", key="k", digest=b"1")
        claim_one(store)
        for wanted in (
            State.DEAD,
            State.COMPLETED,
            State.CANCELLED,
            State.EXPIRED,
            State.DELAYED,
            State.WAITING,
        ):
            make(store, wanted, clock)
        store.configure(Settings(attempts_max=3))
        before = snapshot(store)
        store.close()

        again = open_again(store, clock=clock)

        assert snapshot(again) == before
        assert again.settings() == Settings(attempts_max=3)
        assert submit(again, "a", key="k", digest=b"1").replayed

    @pytest.mark.parametrize("costs", list(Costs))
    @pytest.mark.parametrize("mode", list(Mode))
    def test_a_restart_before_every_claim_does_not_change_the_order(
        self,
        open_store: OpenStore,
        clock: ManualClock,
        open_again: OpenAgain,
        mode: Mode,
        costs: Costs,
    ) -> None:
        settings = Settings(mode=mode, costs=costs, patience_s=3)
        orders = []
        for restarting in (False, True):
            clock.set(START)
            store = open_store(clock=clock, settings=settings, key=1)
            adjust(store, "a", weight=0.3)
            adjust(store, "b", limit=1)
            order: list[str | None] = []
            for n, names in enumerate(["aabbccaabb", "dd", "", "eab", "aaaa", "c", "", "f"] * 2):
                submit_each(store, names, cost=(n % 4) * 1_000_000)
                if restarting:
                    store.close()
                    store = open_again(store, clock=clock)
                claims = claim(store, 2)
                order += ids(claims)
                complete(store, claims[: n % 3])
                clock.advance(1 + n % 3)
            orders.append(order)
            store.close()

        assert orders[0] == orders[1]
        assert len(orders[0]) > 20

    def test_the_restart_of_the_machine_ends_all_leases(
        self, store: Store, clock: ManualClock, open_again: OpenAgain
    ) -> None:
        submit_each(store, "ab")
        first = claim(store, 2)
        clock.advance(1)
        store.close()
        clock.reboot("boot-2")

        again = open_again(store, clock=clock)
        second = claim(again, 2)

        assert ids(second) == ids(first)
        assert [claimed.document.attempts for claimed in second] == [2, 2]
        assert again.finish([Completed(claimed.fence) for claimed in first]) == [
            claimed.fence for claimed in first
        ]
        complete(again, second)

    def test_leases_count_from_the_restart_of_the_machine(
        self, store: Store, clock: ManualClock, open_again: OpenAgain
    ) -> None:
        clock.advance(1_000_000)
        submit(store)
        claim_one(store)
        store.close()
        clock.reboot("boot-2")
        again = open_again(store, clock=clock)
        claimed = claim_one(again)

        clock.advance(LEASE_S - 1)
        assert claim(again) == []
        assert again.renew([claimed.fence], lease_us=LEASE_US) == ([], [])
        clock.advance(LEASE_S)
        assert len(claim(again)) == 1

    def test_fences_rise_through_restarts(
        self, store: Store, clock: ManualClock, open_again: OpenAgain
    ) -> None:
        submit(store)
        fences = []
        for _ in range(4):
            fences.append(claim_one(store).fence.number)
            store.close()
            store = open_again(store, clock=clock)
            clock.advance(LEASE_S)

        assert fences == sorted(set(fences))

    def test_processes_that_have_the_store_open_go_on_in_a_new_epoch(
        self, store: Store, clock: ManualClock, open_again: OpenAgain
    ) -> None:
        other = open_again(store, clock=clock)
        submit_each(store, "aabb")
        first, second = claim_one(store), claim_one(other)
        highest = max(first.fence.number, second.fence.number)

        other.begin_epoch()

        third, fourth = claim_one(store), claim_one(other)
        assert min(third.fence.number, fourth.fence.number) > highest + JUMP_MIN
        assert (submit(store, "c").count, submit(other, "c").count) == (0, -1)
        assert len({found.document.id for found in snapshot(store).documents}) == 6
        assert customers_of(claim(store, 2)) == "cc"

    # ── Two at once ──────────────────────────────────────────────────────────────────────────────

    def test_what_one_process_did_the_other_sees(
        self, store: Store, clock: ManualClock, open_again: OpenAgain
    ) -> None:
        other = open_again(store, clock=clock)
        submit_each(store, "aab")
        store.configure(Settings(waiting_per_customer_max=77))

        claims = claim(other, 2)

        assert other.settings() == Settings(waiting_per_customer_max=77)
        assert customers_of(claims) == "ab"
        assert claims[0].document.id not in ids(claim(store, 9))
        adjust(other, "a", paused=True)
        assert store.finish([Completed(claims[0].fence)]) == []
        submit(store, "a")
        assert claim(store) == []
        assert snapshot(store) == snapshot(other)

    def test_the_count_of_a_customer_is_one_count_in_all_processes(
        self, store: Store, clock: ManualClock, open_again: OpenAgain
    ) -> None:
        other = open_again(store, clock=clock)

        counts = [submit(each).count for each in (store, other, other, store, other)]

        assert counts == [0, -1, -2, -3, -4]

    def test_an_attempt_that_another_process_took_over_has_lost(
        self, store: Store, clock: ManualClock, open_again: OpenAgain
    ) -> None:
        other = open_again(store, clock=clock)
        submit(store)
        late = claim_one(store)
        clock.advance(LEASE_S)
        winner = claim_one(other)

        assert store.finish([Completed(late.fence)]) == [late.fence]
        complete(other, [winner])
        assert [found.state for found in find_all(store)] == [State.COMPLETED]

    def test_a_cancelled_document_is_reported_to_one_of_two_processes(
        self, store: Store, clock: ManualClock, open_again: OpenAgain
    ) -> None:
        other = open_again(store, clock=clock)
        receipts = [submit(store), submit(other)]
        store.cancel([receipts[0].id])
        other.cancel([receipts[1].id])

        reports = [each.claim(0, worker="w", lease_us=1).cancelled for each in (other, store)]

        assert [ids(found) for found in reports] == [ids(receipts), []]

    def test_a_change_of_another_process_wakes_a_waiting_thread(
        self, store: Store, clock: ManualClock, open_again: OpenAgain
    ) -> None:
        other = open_again(store, clock=clock)
        submit(store)
        version = store.version()
        woken: list[int] = []
        thread = threading.Thread(target=lambda: woken.append(store.wait(version, 60)), daemon=True)
        thread.start()

        submit(other)

        thread.join(timeout=10)
        assert len(woken) == 1
        assert woken[0] != version

    def test_every_change_of_another_process_changes_the_version(
        self, store: Store, clock: ManualClock, open_again: OpenAgain
    ) -> None:
        other = open_again(store, clock=clock)
        seen = [store.version()]
        claims = []
        for change in (
            lambda: submit(other),
            lambda: claims.extend(claim(other)),
            lambda: other.cancel([claims[0].document.id]),
            lambda: other.finish([Completed(claims[0].fence)]),
            lambda: other.submit([new("b"), new("c")]),
            lambda: other.purge("b"),
        ):
            change()
            seen.append(store.version())

        assert len(set(seen)) == len(seen)
        assert state(store, claims[0].document.id) is State.COMPLETED
