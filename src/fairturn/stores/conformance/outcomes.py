"""Outcomes: each is recorded exactly once, and only with the current fence of its document."""

from collections.abc import Callable, Sequence

import pytest

from fairturn.clock import SECOND_US, ManualClock
from fairturn.model import (
    DEFAULT_KIND_NAME,
    ENDED,
    ERROR_BYTES_MAX,
    Advanced,
    Completed,
    ContentRef,
    Failed,
    Fence,
    OutageReport,
    Outcome,
    Released,
    Settings,
    Snoozed,
    State,
    Stopped,
)
from fairturn.scheduling.flows import Mode
from fairturn.stores.conformance.steps import (
    BODY,
    LEASE_S,
    LEASE_US,
    START,
    adjust,
    assert_numbers_are_exact,
    claim,
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

Record = Callable[[Store, Sequence[Outcome]], list[Fence]]


def with_finish(store: Store, outcomes: Sequence[Outcome]) -> list[Fence]:
    return store.finish(outcomes)


def with_a_claim(store: Store, outcomes: Sequence[Outcome]) -> list[Fence]:
    claims, lost, _ = store.claim(0, worker="w", lease_us=LEASE_US, outcomes=outcomes)
    assert claims == []
    return lost


def every_outcome(fence: Fence) -> list[Outcome]:
    """Return one outcome of each kind, and both kinds of failure."""
    return [
        Completed(fence, result="1"),
        Failed(fence, "late"),
        Failed(fence, "late", SECOND_US),
        Released(fence),
        Stopped(fence),
        Advanced(fence, DEFAULT_KIND_NAME),
        Snoozed(fence, SECOND_US),
        OutageReport(fence, "unavailable"),
    ]


KINDS = [
    "completed",
    "failed",
    "failed for now",
    "released",
    "stopped",
    "advanced",
    "snoozed",
    "outage report",
]


class OutcomePromises(StoreSuite):
    """Outcomes given to `Store.finish` or `Store.claim`."""

    @pytest.fixture(params=[with_finish, with_a_claim])
    def record(self, request: pytest.FixtureRequest) -> Record:
        record: Record = request.param
        return record

    @pytest.mark.parametrize(("told", "kept"), [(None, None), (20_000, 20_000), (-5, 0)])
    def test_a_completed_document_keeps_what_it_took(
        self, store: Store, record: Record, told: int | None, kept: int | None
    ) -> None:
        receipt = submit(store)
        claimed = claim_one(store)

        record(store, [Completed(claimed.fence, real_cost=told)])

        assert claimed.document.real_cost is None
        assert document(store, receipt.id).real_cost == kept

    def test_documents_that_end_together_keep_what_each_of_them_took(
        self, store: Store, record: Record
    ) -> None:
        receipts = submit_each(store, "abcd")
        took = [30, None, 10, 20]
        claims = dict(zip(took, claim(store, 4), strict=True))

        record(store, [Completed(claims[us].fence, real_cost=us) for us in (20, 30, None, 10)])

        assert [document(store, receipt.id).real_cost for receipt in receipts] == took

    def test_a_completed_document_keeps_its_result(
        self, store: Store, clock: ManualClock, record: Record
    ) -> None:
        receipt = submit(store)
        claimed = claim_one(store)
        clock.advance(2)
        content = ContentRef("aa/result", 12, b"\x05" * 32)

        lost = record(store, [Completed(claimed.fence, '{"text":"\u00e9\U0001f4c4"}', content)])

        stored = store.read(receipt.id)
        assert lost == []
        assert stored is not None
        assert (stored.result, stored.result_content) == ('{"text":"\u00e9\U0001f4c4"}', content)
        assert stored.body == BODY
        assert (stored.document.state, stored.document.error) == (State.COMPLETED, None)
        assert stored.document.ended_at_us == START + 2 * SECOND_US
        assert stored.document.ended

    def test_a_failure_without_a_delay_makes_dead(self, store: Store, record: Record) -> None:
        receipt = submit(store)

        assert record(store, [Failed(claim_one(store).fence, "never again")]) == []

        found = document(store, receipt.id)
        assert (found.state, found.error, found.ended_at_us) == (State.DEAD, "never again", START)
        assert claim(store) == []

    def test_a_failure_with_a_delay_waits_again_when_the_delay_ends(
        self, store: Store, clock: ManualClock, record: Record
    ) -> None:
        receipt = submit(store)
        first = claim_one(store)

        assert record(store, [Failed(first.fence, "busy", 5 * SECOND_US)]) == []

        found = document(store, receipt.id)
        assert (found.state, found.error, found.ended_at_us) == (State.DELAYED, "busy", None)
        assert found.due_at_us == START + 5 * SECOND_US
        clock.advance(5 - 1 / SECOND_US)
        assert claim(store) == []
        clock.advance(1 / SECOND_US)
        again = claim_one(store).document
        assert (again.id, again.order, again.priority) == (
            receipt.id,
            first.document.order,
            first.document.priority,
        )
        assert (again.attempts, again.error) == (2, "busy")

    @pytest.mark.parametrize("retry_in_us", [0, -1])
    def test_a_failure_with_no_time_to_wait_can_be_claimed_at_once(
        self, store: Store, record: Record, retry_in_us: int
    ) -> None:
        submit(store)

        record(store, [Failed(claim_one(store).fence, "busy", retry_in_us)])

        assert claim_one(store).document.attempts == 2

    def test_a_failure_on_the_last_attempt_makes_dead(
        self, open_store: OpenStore, clock: ManualClock, record: Record
    ) -> None:
        store = open_store(clock=clock, settings=Settings(attempts_max=3))
        receipt = submit(store)

        states = []
        for n in range(3):
            assert record(store, [Failed(claim_one(store).fence, f"error {n}", SECOND_US)]) == []
            states.append(state(store, receipt.id))
            clock.advance(1)

        assert states == [State.DELAYED, State.DELAYED, State.DEAD]
        assert document(store, receipt.id).error == "error 2"
        assert document(store, receipt.id).attempts == 3

    def test_a_released_document_waits_again_at_once_with_its_attempt_given_back(
        self, store: Store, record: Record
    ) -> None:
        receipt = submit(store)
        first = claim_one(store)

        assert record(store, [Released(first.fence)]) == []

        found = document(store, receipt.id)
        assert (found.state, found.attempts) == (State.WAITING, 0)
        second = claim_one(store)
        assert second.document.order == first.document.order
        assert second.document.attempts == 1
        assert second.fence.number > first.fence.number

    def test_a_released_document_has_its_charge_given_back(
        self, open_store: OpenStore, clock: ManualClock, record: Record
    ) -> None:
        store = open_store(clock=clock, settings=Settings(mode=Mode.EQUAL))
        submit_each(store, "aabb")
        released = claim_one(store)

        record(store, [Released(released.fence)])

        assert customers_of(claim(store, 4)) == "abab"

    def test_a_released_document_can_be_released_without_end(
        self, open_store: OpenStore, clock: ManualClock, record: Record
    ) -> None:
        store = open_store(clock=clock, settings=Settings(attempts_max=1))
        receipt = submit(store)

        for _ in range(5):
            assert record(store, [Released(claim_one(store).fence)]) == []

        assert state(store, receipt.id) is State.WAITING

    # ── Documents that are to be cancelled ───────────────────────────────────────────────────────

    @pytest.mark.parametrize("kind", KINDS)
    def test_on_a_document_to_be_cancelled_only_a_completion_is_not_a_cancellation(
        self, store: Store, clock: ManualClock, record: Record, kind: str
    ) -> None:
        receipt = submit(store)
        claimed = claim_one(store)
        assert store.cancel([receipt.id]) == [State.RUNNING]
        clock.advance(1)

        outcome = every_outcome(claimed.fence)[KINDS.index(kind)]
        assert record(store, [outcome]) == []

        found = document(store, receipt.id)
        ended = State.COMPLETED if kind == "completed" else State.CANCELLED
        assert (found.state, found.ended_at_us) == (ended, START + SECOND_US)
        clock.advance(3_600)
        assert claim(store) == []

    def test_an_attempt_that_stopped_makes_cancelled(self, store: Store, record: Record) -> None:
        receipt = submit(store)

        assert record(store, [Stopped(claim_one(store).fence)]) == []

        assert state(store, receipt.id) is State.CANCELLED

    # ── Exactly once ─────────────────────────────────────────────────────────────────────────────

    @pytest.mark.parametrize("second", KINDS)
    @pytest.mark.parametrize("first", KINDS)
    def test_a_second_outcome_of_an_attempt_is_not_recorded(
        self, store: Store, record: Record, first: str, second: str
    ) -> None:
        submit(store)
        fence = claim_one(store).fence
        assert record(store, [every_outcome(fence)[KINDS.index(first)]]) == []
        before = snapshot(store)

        assert record(store, [every_outcome(fence)[KINDS.index(second)]]) == [fence]

        assert snapshot(store) == before

    def test_of_several_outcomes_of_an_attempt_in_one_call_the_first_counts(
        self, store: Store, record: Record
    ) -> None:
        receipt = submit(store)
        fence = claim_one(store).fence

        lost = record(store, [Failed(fence, "first"), *every_outcome(fence)])

        assert lost == [fence] * len(KINDS)
        assert document(store, receipt.id).error == "first"
        assert state(store, receipt.id) is State.DEAD

    def test_of_several_outcomes_for_one_document_only_that_of_the_running_attempt_counts(
        self, store: Store, clock: ManualClock, record: Record
    ) -> None:
        receipt = submit(store)
        first = claim_one(store).fence
        clock.advance(LEASE_S)
        second = claim_one(store).fence
        never = Fence(second.document, second.number + 1)
        told = [(never, "0"), (first, "1"), (second, "2"), (second, "3")]

        lost = record(store, [Completed(fence, result) for fence, result in told])

        stored = store.read(receipt.id)
        assert lost == [never, first, second]
        assert stored is not None
        assert (stored.document.state, stored.result) == (State.COMPLETED, "2")

    @pytest.mark.parametrize("order", ["ab", "ba"])
    def test_customers_at_their_limit_continue_in_the_order_of_their_outcomes(
        self, store: Store, record: Record, order: str
    ) -> None:
        for name in "ab":
            adjust(store, name, limit=1)
        submit_each(store, "aabb")
        running = {claimed.document.customer: claimed for claimed in claim(store, 2)}
        assert claim(store) == []

        record(store, [Completed(running[name].fence) for name in order])

        assert customers_of(claim(store, 2)) == order

    @pytest.mark.parametrize("kind", KINDS)
    def test_an_outcome_is_not_recorded_after_another_claim_took_the_document(
        self, store: Store, clock: ManualClock, record: Record, kind: str
    ) -> None:
        receipt = submit(store)
        first = claim_one(store)
        clock.advance(LEASE_S)
        second = claim_one(store)
        before = snapshot(store)

        late = every_outcome(first.fence)[KINDS.index(kind)]
        assert record(store, [late]) == [first.fence]

        assert snapshot(store) == before
        assert record(store, [Completed(second.fence, "2")]) == []
        stored = store.read(receipt.id)
        assert stored is not None
        assert (stored.document.state, stored.result) == (State.COMPLETED, "2")

    @pytest.mark.parametrize("kind", KINDS)
    def test_an_outcome_that_comes_after_the_winner_ended_is_not_recorded(
        self, store: Store, clock: ManualClock, record: Record, kind: str
    ) -> None:
        submit(store)
        first = claim_one(store)
        clock.advance(LEASE_S)
        complete(store, [claim_one(store)])
        before = snapshot(store)

        late = every_outcome(first.fence)[KINDS.index(kind)]
        assert record(store, [late]) == [first.fence]

        assert snapshot(store) == before

    @pytest.mark.parametrize("kind", KINDS)
    def test_an_outcome_of_an_attempt_before_a_retry_is_not_recorded(
        self, store: Store, record: Record, kind: str
    ) -> None:
        submit(store)
        first = claim_one(store)
        fail(store, first)
        store.retry([first.document.id])
        claim_one(store)
        before = snapshot(store)

        late = every_outcome(first.fence)[KINDS.index(kind)]
        assert record(store, [late]) == [first.fence]

        assert snapshot(store) == before

    @pytest.mark.parametrize("step", [-1, 1, 1_000, 2**62])
    def test_an_outcome_with_another_fence_is_not_recorded(
        self, store: Store, record: Record, step: int
    ) -> None:
        submit(store)
        fence = claim_one(store).fence
        wrong = Fence(fence.document, fence.number + step)
        before = snapshot(store)

        assert record(store, every_outcome(wrong)) == [wrong] * len(KINDS)

        assert snapshot(store) == before

    @pytest.mark.parametrize("id", ["", "no such document", "0" * 15, "f" * 15, "\x00"])
    def test_an_outcome_for_a_document_that_does_not_exist_is_not_recorded(
        self, store: Store, record: Record, id: str
    ) -> None:
        submit(store)
        claim_one(store)
        before = snapshot(store)

        assert record(store, [Completed(Fence(id, 1))]) == [Fence(id, 1)]

        assert snapshot(store) == before

    def test_an_outcome_for_a_document_that_never_ran_is_not_recorded(
        self, store: Store, record: Record
    ) -> None:
        receipts = store.submit([new(), new(due_at=START + 1)])
        before = snapshot(store)
        fences = [Fence(receipt.id, number) for receipt in receipts for number in (0, 1)]

        assert record(store, [Completed(fence) for fence in fences]) == fences

        assert snapshot(store) == before

    def test_an_outcome_counts_after_the_lease_expired_until_another_claim_takes_the_document(
        self, store: Store, clock: ManualClock, record: Record
    ) -> None:
        receipt = submit(store)
        claimed = claim_one(store)
        clock.advance(LEASE_S + 1)

        assert record(store, [Completed(claimed.fence)]) == []

        assert state(store, receipt.id) is State.COMPLETED

    def test_one_call_records_what_counts_and_names_the_rest_in_the_order_given(
        self, store: Store, record: Record
    ) -> None:
        submit_each(store, "abcde")
        a, b, c, d, e = claim(store, 5)
        complete(store, [b, d])

        lost = record(
            store,
            [
                Completed(d.fence),
                Completed(a.fence, "1"),
                Failed(b.fence, "late"),
                Failed(c.fence, "no"),
                Released(e.fence),
            ],
        )

        assert lost == [d.fence, b.fence]
        states = [state(store, id) for id in ids([a, b, c, d, e])]
        assert states == [
            State.COMPLETED,
            State.COMPLETED,
            State.DEAD,
            State.COMPLETED,
            State.WAITING,
        ]
        assert_numbers_are_exact(store)

    @pytest.mark.parametrize("ended", ENDED)
    def test_a_document_that_ended_stays_as_it_ended(
        self, store: Store, clock: ManualClock, record: Record, ended: State
    ) -> None:
        id = make(store, ended, clock)
        before = snapshot(store)
        clock.advance(10)

        for number in range(4):
            fence = Fence(id, number)
            assert record(store, every_outcome(fence)) == [fence] * len(KINDS)
            assert store.renew([fence], lease_us=LEASE_US) == ([fence], [])
        assert store.cancel([id]) == [ended]
        if ended is not State.DEAD:
            assert store.retry([id]) == [ended]
        clock.advance(3_600)
        assert claim(store) == []
        clock.step(-3_610)  # the displayed count depends on the time

        assert snapshot(store) == before

    # ── Recording a failure cannot fail ──────────────────────────────────────────────────────────

    @pytest.mark.parametrize(
        "error, stored",
        [
            ("a\x00b", "a\ufffdb"),
            ("lone \ud800 and \udfff", "lone \ufffd and \ufffd"),
            ("\U0001f4a5 \u202e\x1b[31m\r\n", "\U0001f4a5 \u202e\x1b[31m\r\n"),
            ("", ""),
            ("x" * (ERROR_BYTES_MAX + 1), "x" * ERROR_BYTES_MAX),
            ("\u20ac" * ERROR_BYTES_MAX, "\u20ac" * (ERROR_BYTES_MAX // 3)),
        ],
    )
    @pytest.mark.parametrize("retry_in_us", [None, 0])
    def test_an_error_is_stored_in_a_form_that_every_store_can_hold(
        self, store: Store, record: Record, error: str, stored: str, retry_in_us: int | None
    ) -> None:
        receipt = submit(store)

        assert record(store, [Failed(claim_one(store).fence, error, retry_in_us)]) == []

        assert document(store, receipt.id).error == stored

    def test_a_completion_after_failures_leaves_no_error(
        self, store: Store, record: Record
    ) -> None:
        receipt = submit(store)
        fail(store, claim_one(store), retry_in_s=0)

        record(store, [Completed(claim_one(store).fence)])

        assert document(store, receipt.id).error is None

    def test_numbers_are_exact_after_every_outcome(
        self, store: Store, clock: ManualClock, record: Record
    ) -> None:
        submit_each(store, "abcdefghabcdefgh")
        for kind in range(len(KINDS)):
            for claimed in claim(store, 2):
                assert_numbers_are_exact(store)
                record(store, [every_outcome(claimed.fence)[kind]])
                assert_numbers_are_exact(store)
            clock.advance(1)
