"""Snooze and expiry: documents that are postponed, and documents that are not started in time."""

from typing import Any

import pytest

from fairturn.clock import SECOND_US, ManualClock
from fairturn.errors import ExpiryPassed
from fairturn.model import (
    EXPIRE_MAX,
    SNOOZE_US_MAX,
    SNOOZES_MAX,
    Advanced,
    Claim,
    Completed,
    CustomerSettings,
    Document,
    KindSettings,
    Released,
    Settings,
    Snoozed,
    State,
)
from fairturn.scheduling.flows import Costs, Mode
from fairturn.stores.conformance.explanations import document_snapshot, place
from fairturn.stores.conformance.steps import (
    LEASE_S,
    LEASE_US,
    START,
    adjust,
    assert_numbers_are_exact,
    claim,
    claim_one,
    complete,
    customer,
    customers_of,
    document,
    fail,
    ids,
    make,
    new,
    prune_all,
    snapshot,
    state,
    submit,
    submit_each,
    with_kinds,
)
from fairturn.stores.conformance.suite import OpenStore, StoreSuite
from fairturn.stores.contract import QueueStore as Store

DIGEST = b"\x01" * 32


def at(seconds: float) -> int:
    """Return the time this many seconds after `START`."""
    return START + round(seconds * SECOND_US)


def snooze(store: Store, claimed: Claim, seconds: float) -> None:
    assert store.finish([Snoozed(claimed.fence, round(seconds * SECOND_US))]) == []


class SnoozePromises(StoreSuite):
    """`Snoozed`."""

    def test_a_snoozed_document_is_delayed_and_its_attempt_does_not_count(
        self, store: Store, clock: ManualClock
    ) -> None:
        id = submit(store).id

        snooze(store, claim_one(store), 60)

        found = document(store, id)
        assert (found.state, found.due_at_us) == (State.DELAYED, at(60))
        assert (found.attempts, found.error) == (0, None)
        assert_numbers_are_exact(store)
        clock.advance(59)
        assert claim(store) == []
        clock.advance(1)
        assert claim_one(store).document.attempts == 1

    def test_a_snoozed_document_keeps_the_attempts_that_failed(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        store = open_store(clock=clock, settings=Settings(attempts_max=2))
        id = submit(store).id
        fail(store, claim_one(store), retry_in_s=0)
        snooze(store, claim_one(store), 0)
        assert document(store, id).attempts == 1

        fail(store, claim_one(store), retry_in_s=0)

        assert state(store, id) is State.DEAD

    def test_a_snoozed_document_keeps_its_order_and_priority(
        self, store: Store, clock: ManualClock
    ) -> None:
        first, second = submit(store).id, submit(store).id
        before = document(store, first)
        snooze(store, claim_one(store), 5)
        clock.advance(5)

        assert ids(claim(store, 2)) == [first, second]
        after = document(store, first)
        assert (after.priority, after.order) == (before.priority, before.order)

    def test_a_snooze_is_not_a_retry_in_the_summary(self, store: Store) -> None:
        submit(store)

        snooze(store, claim_one(store), 0)

        summary = store.summary()
        assert (summary.started, summary.retried, summary.completed) == (1, 0, 0)

    def test_a_snooze_frees_the_place_of_its_customer(self, store: Store) -> None:
        adjust(store, "acme", limit=1)
        submit(store)
        other = submit(store).id

        snooze(store, claim_one(store), 60)

        assert ids(claim(store)) == [other]

    def test_a_negative_delay_makes_the_document_due_at_once(self, store: Store) -> None:
        id = submit(store).id

        snooze(store, claim_one(store), -5)

        assert ids(claim(store)) == [id]

    def test_a_snooze_of_more_than_a_year_raises_and_records_nothing(self, store: Store) -> None:
        submit(store)
        claimed = claim_one(store)
        before = snapshot(store)

        with pytest.raises(ValueError, match="at most 366 days"):
            store.finish([Snoozed(claimed.fence, SNOOZE_US_MAX + 1)])

        assert snapshot(store) == before

    def test_a_document_that_is_snoozed_too_often_is_dead_and_can_be_retried(
        self, store: Store
    ) -> None:
        id = submit(store).id
        claimed = claim_one(store)
        for _ in range(SNOOZES_MAX):
            claimed = claim_one(store, outcomes=[Snoozed(claimed.fence, 0)])

        snooze(store, claimed, 0)

        dead = document(store, id)
        assert (dead.state, dead.attempts) == (State.DEAD, 1)
        assert dead.error is not None
        assert "1,000 times" in dead.error
        store.retry([id])
        snooze(store, claim_one(store), 0)
        assert state(store, id) is State.DELAYED

    def test_a_document_whose_cancellation_was_requested_is_not_snoozed(self, store: Store) -> None:
        id = submit(store).id
        claimed = claim_one(store)
        store.cancel([id])

        snooze(store, claimed, 60)

        assert state(store, id) is State.CANCELLED

    def test_a_snoozed_document_can_be_cancelled(self, store: Store, clock: ManualClock) -> None:
        id = submit(store).id
        snooze(store, claim_one(store), 60)

        assert store.cancel([id]) == [State.CANCELLED]

        clock.advance(61)
        assert claim(store) == []


class ExpiryPromises(StoreSuite):
    """`NewDocument.expires_at`, and `KindSettings.expires_in_s`."""

    # ── What expires ─────────────────────────────────────────────────────────────────────────────

    def test_a_document_is_claimed_until_its_expiry_and_never_from_then_on(
        self, store: Store, clock: ManualClock
    ) -> None:
        early, late = submit(store, "a", expires_at=at(10)), submit(store, "b", expires_at=at(10))
        clock.advance(10 - 1 / SECOND_US)
        assert ids(claim(store)) == [early.id]

        clock.advance(1 / SECOND_US)

        assert claim(store) == []
        found = document(store, late.id)
        assert (found.state, found.expires_at_us) == (State.EXPIRED, at(10))
        assert (found.ended_at_us, found.attempts, found.error) == (at(10), 0, None)
        assert_numbers_are_exact(store)

    def test_a_document_without_an_expiry_never_expires(
        self, store: Store, clock: ManualClock
    ) -> None:
        id = submit(store).id
        clock.advance(366 * 86_400)

        assert store.expire() == 0
        assert (ids(claim(store)), document(store, id).expires_at_us) == ([id], None)

    def test_a_delayed_document_expires_too(self, store: Store, clock: ManualClock) -> None:
        id = submit(store, due_at=at(60), expires_at=at(10)).id
        clock.advance(10)

        assert store.expire() == 1

        assert state(store, id) is State.EXPIRED
        clock.advance(60)
        assert claim(store) == []
        assert_numbers_are_exact(store)

    def test_a_document_that_becomes_due_when_it_expires_is_not_claimed(
        self, store: Store, clock: ManualClock
    ) -> None:
        id = submit(store, due_at=at(10), expires_at=at(20)).id
        clock.advance(20)

        assert claim(store) == []
        assert state(store, id) is State.EXPIRED

    def test_a_running_document_does_not_expire(self, store: Store, clock: ManualClock) -> None:
        id = submit(store, expires_at=at(10)).id
        claimed = claim_one(store)
        clock.advance(20)

        assert store.expire() == 0
        assert claim(store) == []
        assert state(store, id) is State.RUNNING
        complete(store, [claimed])
        assert state(store, id) is State.COMPLETED

    @pytest.mark.parametrize("earlier", [False, True])
    def test_a_document_whose_only_attempt_does_not_count_expires(
        self, store: Store, clock: ManualClock, earlier: bool
    ) -> None:
        released, snoozed = (submit(store, c, expires_at=at(10)).id for c in "ab")
        first, second = claim(store, 2)
        clock.advance(20)
        if earlier:
            assert store.expire() == 0

        assert claim(store, outcomes=[Released(first.fence), Snoozed(second.fence, 0)]) == []

        assert (state(store, released), state(store, snoozed)) == (State.EXPIRED, State.EXPIRED)
        assert store.expire() == 0
        assert_numbers_are_exact(store)

    def test_a_released_document_is_claimed_again_before_its_expiry(
        self, store: Store, clock: ManualClock
    ) -> None:
        id = submit(store, expires_at=at(10)).id
        store.finish([Released(claim_one(store).fence)])
        clock.advance(9)

        assert ids(claim(store)) == [id]

    def test_a_document_with_a_counted_attempt_does_not_expire(
        self, store: Store, clock: ManualClock
    ) -> None:
        failed, lost = (submit(store, c, expires_at=at(10)).id for c in "ab")
        first, _ = claim(store, 2)
        fail(store, first, retry_in_s=60)
        clock.advance(LEASE_S + 60)

        assert store.expire() == 0
        assert sorted(ids(claim(store, 2))) == sorted([failed, lost])

    def test_a_failed_attempt_that_is_followed_by_a_snooze_still_counts(
        self, store: Store, clock: ManualClock
    ) -> None:
        id = submit(store, expires_at=at(10)).id
        fail(store, claim_one(store), retry_in_s=0)
        snooze(store, claim_one(store), 0)
        clock.advance(20)

        assert store.expire() == 0
        assert ids(claim(store)) == [id]

    def test_a_document_that_has_finished_a_step_does_not_expire(
        self, kinds: Store, clock: ManualClock
    ) -> None:
        id = submit(kinds, expires_at=at(10)).id
        kinds.finish([Advanced(claim_one(kinds).fence, "ocr")])
        clock.advance(20)

        assert kinds.expire() == 0
        claimed = claim_one(kinds)
        kinds.finish([Released(claimed.fence)])
        assert (kinds.expire(), ids(claim(kinds))) == (0, [id])

    def test_an_expired_document_stays_expired_when_the_clock_is_set_back(
        self, store: Store, clock: ManualClock
    ) -> None:
        id = submit(store, expires_at=at(10)).id
        clock.advance(10)
        store.expire()

        clock.step(-3_600)

        assert claim(store) == []
        assert state(store, id) is State.EXPIRED

    # ── Recording ────────────────────────────────────────────────────────────────────────────────

    def test_a_call_records_at_most_the_limit_the_earliest_first(
        self, store: Store, clock: ManualClock
    ) -> None:
        made = [submit(store, expires_at=at(seconds)).id for seconds in (3, 1, 2, 9)]
        clock.advance(5)

        assert store.expire(2) == 2
        assert [state(store, id) for id in made] == [
            State.WAITING,
            State.EXPIRED,
            State.EXPIRED,
            State.WAITING,
        ]
        assert (store.expire(2), store.expire(2)) == (1, 0)
        assert state(store, made[3]) is State.WAITING

    @pytest.mark.parametrize("limit", [0, -1, EXPIRE_MAX + 1])
    def test_a_limit_out_of_range_raises(self, store: Store, limit: int) -> None:
        with pytest.raises(ValueError, match="limit is"):
            store.expire(limit)

    def test_a_claim_records_all_that_have_expired_before_it_takes_a_document(
        self, store: Store, clock: ManualClock
    ) -> None:
        n = EXPIRE_MAX + 5
        store.submit([new(expires_at=at(10)) for _ in range(n)])
        last = submit(store).id
        clock.advance(10)

        assert ids(claim(store)) == [last]

        assert store.summary().expired == n
        assert_numbers_are_exact(store)

    def test_the_next_document_of_the_customer_takes_the_place_of_an_expired_one(
        self, store: Store, clock: ManualClock
    ) -> None:
        submit(store, "a", expires_at=at(10))
        submit(store, "b")
        second = submit(store, "a").id
        submit(store, "a")
        assert customers_of(claim(store, 0)) == ""
        clock.advance(10)
        store.expire()

        found = claim(store, 3)

        assert ids(found)[0] == second
        assert customers_of(found) == "aba"

    def test_a_customer_with_only_expired_documents_is_left_out_of_the_turns(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        stores = [open_store(clock=clock) for _ in range(2)]
        for store in stores:
            submit_each(store, "bcbc")
        for _ in range(3):
            submit(stores[0], "a", expires_at=at(10))
        clock.advance(10)

        orders = [customers_of(claim(store, 6)) for store in stores]

        assert orders[0] == orders[1] == "bcbc"

    def test_expired_documents_are_counted_as_ended_and_not_as_attempts(
        self, store: Store, clock: ManualClock
    ) -> None:
        make(store, State.EXPIRED, clock)
        complete_one = submit(store, "b").id
        store.finish([Completed(claim_one(store).fence)])

        summary = store.summary()

        assert (summary.expired, summary.started, summary.completed) == (1, 1, 1)
        assert (summary.dead, summary.cancelled, summary.retried) == (0, 0, 0)
        assert state(store, complete_one) is State.COMPLETED
        assert customer(store, "a-expired-one").waiting == 0

    def test_expired_documents_are_not_reported_as_cancelled(
        self, store: Store, clock: ManualClock
    ) -> None:
        make(store, State.EXPIRED, clock)

        claimed = store.claim(1, worker="w", lease_us=LEASE_US)

        assert claimed == ([], [], [])

    def test_recording_changes_the_version_only_if_a_document_expires(
        self, store: Store, clock: ManualClock
    ) -> None:
        submit(store, expires_at=at(10))
        version = store.version()
        store.expire()
        assert store.version() == version

        clock.advance(10)
        store.expire()

        assert store.version() != version

    def test_a_document_that_expires_makes_room_for_another(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        store = open_store(clock=clock, settings=Settings(waiting_per_customer_max=1))
        submit(store, expires_at=at(10))
        clock.advance(10)
        store.expire()

        assert submit(store).count == -1

    def test_expired_documents_are_kept_for_their_own_time(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        store = open_store(clock=clock, settings=Settings(expired_kept_s=60))
        id = make(store, State.EXPIRED, clock, content_name="bb/content")
        clock.advance(60)
        assert prune_all(store) == []

        clock.advance(1)

        assert prune_all(store) == ["bb/content"]
        assert store.read(id) is None
        assert store.summary().expired == 1

    def test_a_purged_document_does_not_expire(self, store: Store, clock: ManualClock) -> None:
        submit(store, expires_at=at(10))
        store.purge("acme")
        clock.advance(10)

        assert (store.expire(), store.summary().expired) == (0, 0)

    def test_a_cancelled_document_does_not_expire(self, store: Store, clock: ManualClock) -> None:
        id = submit(store, expires_at=at(10)).id
        store.cancel([id])
        clock.advance(10)

        assert store.expire() == 0
        assert state(store, id) is State.CANCELLED

    def test_another_mode_keeps_expiries(self, store: Store, clock: ManualClock) -> None:
        submit(store, expires_at=at(10))
        store.configure(Settings(mode=Mode.LEVELS))
        clock.advance(10)

        assert claim(store) == []

    # ── Submitting ───────────────────────────────────────────────────────────────────────────────

    @pytest.mark.parametrize("seconds", [-60, 0])
    def test_a_submission_that_has_expired_is_refused_and_changes_nothing(
        self, store: Store, seconds: float
    ) -> None:
        submit(store)
        before = snapshot(store)

        with pytest.raises(ExpiryPassed, match="2023-11-14T22:1.*which has passed"):
            store.submit([new(), new(expires_at=at(seconds))])

        assert snapshot(store) == before

    def test_a_repeated_submission_is_replayed_after_its_expiry(
        self, store: Store, clock: ManualClock
    ) -> None:
        fields: dict[str, Any] = {"key": "k", "digest": DIGEST}
        first = submit(store, expires_at=at(10), **fields)
        clock.advance(20)

        again = submit(store, expires_at=at(10), **fields)
        later = submit(store, expires_at=at(90), **fields)

        assert (again, later) == (first._replace(replayed=True),) * 2
        assert document(store, first.id).expires_at_us == at(10)

    def test_the_rule_of_a_kind_applies_to_documents_without_an_expiry(
        self, kinds: Store, clock: ManualClock
    ) -> None:
        kinds.configure_kind("ocr", KindSettings(expires_in_s=60))
        clock.advance(5)

        made = kinds.submit(
            [
                new(kind="ocr"),
                new(kind="ocr", expires_at=at(7)),
                new(kind="text"),
                new(kind="ocr", due_at=at(30)),
                new(kind="ocr", due_at=at(1)),
            ]
        )

        expiries = [document(kinds, receipt.id).expires_at_us for receipt in made]
        assert expiries == [at(65), at(7), None, at(90), at(65)]

    def test_the_rule_of_the_default_kind_applies_to_uploads(
        self, store: Store, clock: ManualClock
    ) -> None:
        store.configure_kind("default", KindSettings(expires_in_s=60))

        made = store.submit([new(c) for c in "aab"])

        assert [document(store, r.id).expires_at_us for r in made] == [at(60)] * 3
        clock.advance(60)
        assert (claim(store), store.summary().expired) == ([], 3)

    def test_a_changed_rule_applies_to_later_submissions(self, kinds: Store) -> None:
        kinds.configure_kind("ocr", KindSettings(expires_in_s=60))
        first = submit(kinds, kind="ocr").id

        kinds.configure_kind("ocr", KindSettings())

        assert document(kinds, first).expires_at_us == at(60)
        assert document(kinds, submit(kinds, kind="ocr").id).expires_at_us is None

    # ── Retry ────────────────────────────────────────────────────────────────────────────────────

    def test_an_expired_document_is_retried_with_a_new_expiry_only(
        self, store: Store, clock: ManualClock
    ) -> None:
        id = make(store, State.EXPIRED, clock)
        before = document(store, id)
        assert store.retry([id]) == [State.EXPIRED]
        assert document(store, id) == before

        assert store.retry([id], expires_at=at(60)) == [State.EXPIRED]

        assert document(store, id) == before._replace(
            state=State.WAITING, ended_at_us=None, expires_at_us=at(60)
        )
        assert store.retry([id], expires_at=at(60)) == [State.WAITING]
        assert_numbers_are_exact(store)
        assert ids(claim(store)) == [id]

    def test_a_retried_document_expires_again(self, store: Store, clock: ManualClock) -> None:
        id = make(store, State.EXPIRED, clock)
        store.retry([id], expires_at=at(60))
        clock.advance(60)

        assert claim(store) == []

        assert state(store, id) is State.EXPIRED
        assert store.summary().expired == 2

    def test_an_expired_document_that_was_never_due_is_delayed_again(
        self, store: Store, clock: ManualClock
    ) -> None:
        id = submit(store, due_at=at(60), expires_at=at(10)).id
        clock.advance(10)
        store.expire()

        store.retry([id], expires_at=at(90))

        assert state(store, id) is State.DELAYED
        assert claim(store) == []
        clock.advance(50)
        assert ids(claim(store, 2)) == [id]

    def test_an_expired_document_that_was_due_meanwhile_waits_in_the_next_claim(
        self, store: Store, clock: ManualClock
    ) -> None:
        id = submit(store, due_at=at(60), expires_at=at(10)).id
        clock.advance(10)
        store.expire()
        clock.advance(100)

        store.retry([id], expires_at=at(900))

        assert ids(claim(store, 2)) == [id]

    def test_a_snoozed_document_that_expired_waits_after_a_retry(
        self, store: Store, clock: ManualClock
    ) -> None:
        id = submit(store, expires_at=at(10)).id
        snooze(store, claim_one(store), 3_600)
        clock.advance(10)
        store.expire()

        store.retry([id], expires_at=at(60))

        assert ids(claim(store, 2)) == [id]

    def test_a_retry_keeps_the_place_of_an_expired_document(
        self, store: Store, clock: ManualClock
    ) -> None:
        first = submit(store, expires_at=at(10)).id
        second, third = submit(store).id, submit(store).id
        clock.advance(10)

        store.expire()
        store.retry([first], expires_at=at(60))
        store.cancel([second])

        assert ids(claim(store, 3)) == [first, third]

    def test_a_retry_keeps_the_cost_of_an_expired_document(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        settings = Settings(mode=Mode.EQUAL, costs=Costs.KNOWN)
        store = open_store(clock=clock, settings=settings)
        submit(store, "a")
        costly = submit(store, "a", cost=5_000_000, expires_at=at(10)).id
        submit_each(store, "aabbbb")
        clock.advance(10)
        store.expire()
        store.retry([costly], expires_at=at(60))

        assert customers_of(claim(store, 7)) == "ababbba"

    def test_a_retry_of_a_dead_document_removes_its_expiry_unless_it_gets_a_new_one(
        self, store: Store, clock: ManualClock
    ) -> None:
        forever, again = (submit(store, c, expires_at=at(10)).id for c in "ab")
        for claimed in claim(store, 2):
            fail(store, claimed)

        store.retry([forever])
        store.retry([again], expires_at=at(20))
        clock.advance(30)

        assert ids(claim(store, 2)) == [forever]
        assert state(store, again) is State.EXPIRED
        assert document(store, forever).expires_at_us is None

    def test_a_retry_with_an_expiry_that_has_passed_is_refused_and_changes_nothing(
        self, store: Store, clock: ManualClock
    ) -> None:
        expired, dead = make(store, State.EXPIRED, clock), make(store, State.DEAD)
        before = snapshot(store)

        with pytest.raises(ExpiryPassed):
            store.retry([expired, dead], expires_at=clock.now())

        assert snapshot(store) == before

    # ── Reading ──────────────────────────────────────────────────────────────────────────────────

    def test_a_snapshot_leaves_out_what_has_expired(self, store: Store, clock: ManualClock) -> None:
        expired = [submit(store, c, expires_at=at(10)).id for c in "aab"]
        own, other = submit(store, "a").id, submit(store, "c").id
        assert (place(store, own).before.own, place(store, other).bounds.most) == (2, 2)
        clock.advance(10)
        before = snapshot(store)

        found = [place(store, id) for id in (own, other)]

        assert [f.before.own for f in found] == [0, 0]
        assert [f.bounds.most for f in found] == [0, 1]
        assert document_snapshot(store, expired[0]).queue_view is None
        assert snapshot(store) == before
        assert ids(claim(store, 2)) == [own, other]

    @pytest.mark.parametrize("mode", list(Mode))
    def test_a_snapshot_leaves_out_all_documents_of_a_flow_that_have_expired(
        self, open_store: OpenStore, clock: ManualClock, mode: Mode
    ) -> None:
        store = open_store(clock=clock, settings=Settings(mode=mode))
        for _ in range(3):
            submit(store, "a", expires_at=at(10))
        claim(store, 0)
        own = submit(store, "b").id
        clock.advance(10)

        assert place(store, own).bounds.most == 0

    def test_the_next_documents_are_those_that_have_not_expired(
        self, store: Store, clock: ManualClock
    ) -> None:
        for customer_name in "aab":
            submit(store, customer_name, expires_at=at(10))
        expected = [submit(store, c).id for c in "cd"]
        clock.advance(10)

        lanes = store.lanes()

        assert ids(lanes.upcoming[0]) == expected

    def test_an_expiry_belongs_to_the_document(self, store: Store, clock: ManualClock) -> None:
        id = submit(store, expires_at=at(10)).id
        claimed = claim_one(store)

        found: list[Document] = [document(store, id), claimed.document]

        assert [each.expires_at_us for each in found] == [at(10)] * 2

    def test_a_customer_without_other_documents_is_forgotten_with_its_last(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        settings = Settings(expired_kept_s=0, reset_interval_s=1)
        store = open_store(clock=clock, settings=settings)
        make(store, State.EXPIRED, clock)
        clock.advance(60)
        claim(store)

        prune_all(store)

        assert store.customers().customers == []

    def test_an_expired_document_of_a_paused_customer_is_recorded(
        self, store: Store, clock: ManualClock
    ) -> None:
        store.adjust("acme", CustomerSettings(paused=True))
        id = submit(store, expires_at=at(10)).id
        clock.advance(10)

        assert claim(store) == []

        assert state(store, id) is State.EXPIRED

    def test_an_expired_document_of_a_kind_that_nothing_serves_is_recorded(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        store = with_kinds(open_store(clock=clock))
        id = submit(store, kind="ocr", expires_at=at(10)).id
        clock.advance(10)

        assert claim(store, kinds=["text"]) == []

        assert state(store, id) is State.EXPIRED
