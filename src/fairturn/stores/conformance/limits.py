"""Limits on waiting documents, per customer and overall, and due times."""

import pytest

from fairturn.clock import SECOND_US, ManualClock
from fairturn.errors import QueueFull
from fairturn.model import Settings, State
from fairturn.scheduling.flows import Mode
from fairturn.stores.conformance.steps import (
    START,
    assert_numbers_are_exact,
    claim,
    claim_each,
    claim_one,
    complete,
    customer,
    document,
    fail,
    ids,
    new,
    snapshot,
    state,
    submit,
    submit_each,
)
from fairturn.stores.conformance.suite import OpenStore, StoreSuite
from fairturn.stores.contract import QueueStore as Store

FEW_EACH = Settings(waiting_per_customer_max=3)
FEW = Settings(waiting_max=4)


class LimitPromises(StoreSuite):
    """`QueueFull`: the submission is rejected and nothing changes."""

    def test_a_customer_may_have_as_many_documents_waiting_as_the_limit_says(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        store = open_store(clock=clock, settings=FEW_EACH)
        store.submit([new()] * 3)
        before = snapshot(store)

        with pytest.raises(QueueFull, match="'acme' has 3 documents.*waiting_per_customer_max"):
            submit(store)

        assert snapshot(store) == before
        assert submit(store, "bolt").count == 0

    def test_a_refusal_names_the_limit_and_the_customer(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        store = open_store(clock=clock, settings=FEW_EACH)
        submit(store)

        with pytest.raises(QueueFull) as refused:
            store.submit([new()] * 3)

        assert (refused.value.limit, refused.value.maximum) == ("waiting_per_customer_max", 3)
        assert (refused.value.waiting, refused.value.customer) == (1, "acme")

    def test_as_many_documents_may_wait_in_all_as_the_limit_says(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        store = open_store(clock=clock, settings=FEW)
        submit_each(store, "abcd")
        before = snapshot(store)

        with pytest.raises(QueueFull, match="waiting_max") as refused:
            submit(store, "e")

        assert (refused.value.limit, refused.value.maximum) == ("waiting_max", 4)
        assert (refused.value.waiting, refused.value.customer) == (4, None)
        assert snapshot(store) == before

    def test_a_call_that_would_pass_a_limit_stores_nothing_and_makes_no_check(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        store = open_store(clock=clock, settings=FEW_EACH)
        store.submit([new()] * 2)
        before = snapshot(store)

        with pytest.raises(QueueFull):
            store.submit([new("bolt"), new(), new()])

        assert snapshot(store) == before
        assert submit(store).count == -2
        assert submit(store, "bolt").count == 0

    @pytest.mark.parametrize("settings", [FEW_EACH, Settings(waiting_max=3)])
    def test_documents_that_are_not_due_yet_count_as_waiting(
        self, open_store: OpenStore, clock: ManualClock, settings: Settings
    ) -> None:
        store = open_store(clock=clock, settings=settings)
        submit(store)
        store.submit([new(due_at=START + SECOND_US)] * 2)

        with pytest.raises(QueueFull):
            submit(store)
        with pytest.raises(QueueFull):
            submit(store, due_at=START + SECOND_US)

    @pytest.mark.parametrize("settings", [FEW_EACH, Settings(waiting_max=3)])
    def test_a_claim_and_a_cancel_make_room(
        self, open_store: OpenStore, clock: ManualClock, settings: Settings
    ) -> None:
        store = open_store(clock=clock, settings=settings)
        receipts = store.submit([new(), new(), new(due_at=START + SECOND_US)])
        claim_one(store)
        store.cancel(ids(receipts[1:]))

        store.submit([new()] * 3)

        with pytest.raises(QueueFull):
            submit(store)

    def test_a_document_that_waits_again_takes_its_place_again(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        store = open_store(clock=clock, settings=FEW_EACH)
        store.submit([new()] * 3)
        fail(store, claim_one(store), retry_in_s=60)

        with pytest.raises(QueueFull):
            submit(store)

    @pytest.mark.parametrize(
        "settings", [Settings(waiting_per_customer_max=1), Settings(waiting_max=1)]
    )
    def test_a_known_key_is_answered_even_when_more_wait_than_allowed(
        self, store: Store, settings: Settings
    ) -> None:
        first = submit(store, key="k", digest=b"d")
        store.submit([new()] * 2)
        store.configure(settings)

        assert submit(store, key="k", digest=b"d") == first._replace(replayed=True)

    def test_other_limits_hold_from_the_next_submission_on(self, store: Store) -> None:
        submit(store)

        store.configure(Settings(waiting_per_customer_max=2))
        submit(store)
        with pytest.raises(QueueFull):
            submit(store)

        store.configure(Settings(waiting_per_customer_max=3))
        assert submit(store).count == -2


class DueTimePromises(StoreSuite):
    """Documents with a due time."""

    def test_a_document_waits_from_the_moment_at_which_it_is_due(
        self, store: Store, clock: ManualClock
    ) -> None:
        receipt = submit(store, due_at=START + SECOND_US)

        assert state(store, receipt.id) is State.DELAYED
        clock.set(START + SECOND_US - 1)
        assert claim(store) == []
        clock.set(START + SECOND_US)
        assert ids(claim(store)) == [receipt.id]

    @pytest.mark.parametrize("due_at", [START, START - 1, 0, -1])
    def test_a_document_that_is_due_already_waits_at_once(self, store: Store, due_at: int) -> None:
        receipt = submit(store, due_at=due_at)

        found = document(store, receipt.id)

        assert (found.state, found.due_at_us) == (State.WAITING, due_at)
        assert found.order is not None

    def test_a_document_is_checked_when_submitted_and_not_when_due(
        self, store: Store, clock: ManualClock
    ) -> None:
        store.submit([new()] * 3)
        receipt = submit(store, due_at=START + 3_600 * SECOND_US)
        clock.advance(3_600)

        claimed = claim_each(store)[-1].document

        assert (receipt.count, receipt.priority) == (-3, 2)
        assert (claimed.id, claimed.count, claimed.priority) == (receipt.id, -3, 2)
        assert customer(store, "acme").count_updated_at_us == START

    @pytest.mark.parametrize("mode", list(Mode))
    def test_documents_that_became_due_are_served_by_due_time_and_then_by_submission(
        self, open_store: OpenStore, clock: ManualClock, mode: Mode
    ) -> None:
        store = open_store(clock=clock, settings=Settings(mode=mode))
        for name, due_in_s in [("late", 20), ("early", 10), ("early too", 10), ("first", None)]:
            due_at = None if due_in_s is None else START + due_in_s * SECOND_US
            submit(store, name, due_at=due_at)
        clock.advance(25)
        submit(store, "second")

        claims = claim(store, 10)

        names = [claimed.document.customer for claimed in claims]
        assert names == ["first", "second", "early", "early too", "late"]
        orders = [claimed.document.order or 0 for claimed in claims]
        assert orders == sorted(set(orders))

    def test_the_order_given_when_first_due_is_kept_for_ever(
        self, store: Store, clock: ManualClock
    ) -> None:
        receipt = submit(store, due_at=START + SECOND_US)
        assert document(store, receipt.id).order is None
        clock.advance(1)
        first = claim_one(store)
        submit(store, "bolt")
        fail(store, first, retry_in_s=5)
        clock.advance(5)

        second = claim(store, 2)[-1]

        assert second.document.id == receipt.id
        assert second.document.order == first.document.order == document(store, receipt.id).order

    def test_numbers_are_exact_while_documents_become_due(
        self, store: Store, clock: ManualClock
    ) -> None:
        store.submit([new(due_at=START + n * SECOND_US) for n in range(5)])

        for running in range(5):
            assert_numbers_are_exact(store)
            assert len(claim(store, 5)) == 1
            assert_numbers_are_exact(store)
            assert (store.summary().delayed, store.summary().running) == (4 - running, running + 1)
            clock.advance(1)

    def test_a_document_that_is_not_due_does_not_block_later_ones(
        self, store: Store, clock: ManualClock
    ) -> None:
        submit(store, due_at=START + SECOND_US)
        later = submit(store)

        assert ids(claim(store, 2)) == [later.id]

    @pytest.mark.parametrize("step_s", [1, -1, 3_600, -3_600, 10**9])
    def test_a_step_of_the_wall_clock_neither_delays_a_retry_nor_brings_it_forward(
        self, store: Store, clock: ManualClock, step_s: int
    ) -> None:
        if not self.delays_by_uptime:
            pytest.skip("retries of this store follow the clock of its server")
        receipt = submit(store)
        fail(store, claim_one(store), retry_in_s=60)

        clock.step(step_s)
        clock.advance(59)
        assert claim(store) == []
        waiting = store.snapshot(receipt.id)
        assert waiting is not None
        assert waiting.document.due_at_us == clock.now() + SECOND_US
        clock.advance(1)
        due = store.snapshot(receipt.id)
        assert due is not None
        assert due.queue_view is not None

        (again,) = claim(store)
        assert (again.document.id, again.document.attempts) == (receipt.id, 2)
        assert (again.document.due_at_us or 0) <= clock.now()
        assert_numbers_are_exact(store)

    def test_a_retry_is_due_by_the_wall_clock_after_a_restart_of_the_machine(
        self, store: Store, clock: ManualClock
    ) -> None:
        if not self.delays_by_uptime:
            pytest.skip("retries of this store follow the clock of its server")
        receipt = submit(store)
        clock.advance(1_000)
        fail(store, claim_one(store), retry_in_s=60)
        clock.reboot("boot-2")

        clock.advance(59)
        assert claim(store) == []
        clock.advance(1)
        assert ids(claim(store)) == [receipt.id]

    def test_a_wall_clock_that_steps_back_delays_only_what_is_not_due_yet(
        self, store: Store, clock: ManualClock
    ) -> None:
        receipt = submit(store, due_at=START + 60 * SECOND_US)
        clock.advance(60)
        complete(store, claim(store))
        waiting = submit(store, due_at=START + 60 * SECOND_US)
        clock.step(-3_600)

        assert ids(claim(store, 2)) == [waiting.id]
        assert state(store, receipt.id) is State.COMPLETED
