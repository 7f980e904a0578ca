"""Pipelines: steps of a document, its stored attempts and its checkpoint."""

from typing import Any

import pytest

from fairturn.clock import SECOND_US, ManualClock
from fairturn.model import (
    ATTEMPTS_STORED_MAX,
    CHECKPOINT_BYTES_MAX,
    DETAILS_BYTES_MAX,
    KINDS_MAX,
    LEASE_EXPIRED,
    STEP_VALUE_BYTES_MAX,
    STEPS_MAX,
    Advanced,
    AttemptOutcome,
    AttemptRecord,
    Claim,
    Completed,
    ContentRef,
    Failed,
    Fence,
    FinishedStep,
    KindPolicy,
    KindSettings,
    Outcome,
    Released,
    Settings,
    State,
    Stopped,
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
    customers_of,
    document,
    fail,
    ids,
    prune_all,
    snapshot,
    state,
    submit,
    with_kinds,
)
from fairturn.stores.conformance.suite import OpenStore, StoreSuite
from fairturn.stores.contract import QueueStore as Store

FILE = ContentRef("aa/step", 12, b"\x05" * 32)
OPEN = Settings(kinds=KindPolicy.OPEN)


def advance(store: Store, claimed: Claim, kind: str = "ocr", **fields: Any) -> None:
    assert store.finish([Advanced(claimed.fence, kind, **fields)]) == []


def attempts(store: Store, id: str, *, values: bool = False) -> list[AttemptRecord]:
    found = store.attempts(id, values=values)
    assert found is not None
    return found


def running_at_step(store: Store, step: int, **fields: Any) -> Claim:
    """Submit a document, let it finish this many steps of its kind, and claim the next."""
    submit(store, **fields)
    claimed = claim_one(store)
    for _ in range(step):
        advance(store, claimed, claimed.document.kind)
        claimed = claim_one(store)
    assert claimed.document.step == step
    return claimed


class PipelinePromises(StoreSuite):
    """`Advanced`."""

    def test_an_advanced_document_waits_for_the_other_kind_as_the_same_document(
        self, kinds: Store, clock: ManualClock
    ) -> None:
        receipts = [submit(kinds) for _ in range(5)]  # the last has priority 2
        before = document(kinds, receipts[4].id)
        claimed = claim(kinds, 5)[4]
        clock.advance(2)

        advance(kinds, claimed)

        assert document(kinds, receipts[4].id) == before._replace(
            kind="ocr",
            step=1,
            claimed_at_us=claimed.document.claimed_at_us,
            worker=claimed.document.worker,
        )
        assert before.state is State.WAITING
        assert claim(kinds, kinds=["default", "text"]) == []
        assert ids(claim(kinds, kinds=["ocr"])) == [receipts[4].id]

    def test_the_next_step_gets_the_value_and_the_file_of_the_last_one(self, kinds: Store) -> None:
        submit(kinds)
        advance(kinds, claim_one(kinds), value='{"text":"\\u00e9"}', content=FILE)

        second = claim_one(kinds)
        advance(kinds, second, "text")
        third = claim_one(kinds)

        assert (second.previous, second.previous_content) == ('{"text":"\\u00e9"}', FILE)
        assert (third.previous, third.previous_content) == (None, None)
        assert second.body == third.body

    def test_the_first_step_has_no_previous_value_and_no_finished_steps(self, kinds: Store) -> None:
        submit(kinds)

        claimed = claim_one(kinds)

        assert (claimed.previous, claimed.previous_content, claimed.steps) == (None, None, ())
        assert claimed.document.step == 0

    def test_a_claim_has_the_finished_steps(self, kinds: Store, clock: ManualClock) -> None:
        submit(kinds)
        fail(kinds, claim_one(kinds, worker="first"), retry_in_s=0)
        clock.advance(1)
        again = claim_one(kinds, worker="second")
        clock.advance(2)
        advance(kinds, again, value="1")
        clock.advance(3)
        advance(kinds, claim_one(kinds, worker="third"), "text", value="2")

        at = START + SECOND_US
        assert claim_one(kinds).steps == (
            FinishedStep(0, "default", 2, "second", at, at + 2 * SECOND_US),
            FinishedStep(1, "ocr", 1, "third", at + 5 * SECOND_US, at + 5 * SECOND_US),
        )

    def test_documents_that_are_claimed_together_have_their_own_steps(self, kinds: Store) -> None:
        for customer in "abc":
            submit(kinds, customer)
        first, second, third = claim(kinds, 3)
        advance(kinds, first, value="1")
        advance(kinds, second, "text", value="2")
        kinds.finish([Released(third.fence)])

        found = {c.document.customer: (c.previous, len(c.steps)) for c in claim(kinds, 3)}

        assert found == {"a": ("1", 1), "b": ("2", 1), "c": (None, 0)}

    def test_a_document_may_advance_to_its_own_kind(self, kinds: Store) -> None:
        id = submit(kinds).id

        advance(kinds, claim_one(kinds), "default", value="1")

        again = claim_one(kinds)
        assert (again.document.id, again.document.step, again.previous) == (id, 1, "1")

    def test_a_cost_applies_to_the_next_step(self, kinds: Store) -> None:
        submit(kinds, cost=5_000_000)
        advance(kinds, claim_one(kinds))
        second = claim_one(kinds)
        advance(kinds, second, "text", cost=2_000_000)

        assert second.document.cost == 5_000_000
        assert claim_one(kinds).document.cost == 2_000_000

    def test_the_cost_of_the_next_step_is_charged_in_the_flow_of_its_kind(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        settings = Settings(mode=Mode.EQUAL, costs=Costs.KNOWN)
        store = with_kinds(open_store(clock=clock, settings=settings))
        for _ in range(3):
            submit(store, "acme")
            submit(store, "bolt")
        for claimed in claim(store, 6):
            of_acme = claimed.document.customer == "acme"
            advance(store, claimed, cost=3_000_000 if of_acme else 1_000_000)

        assert customers_of(claim(store, 6)) == "abbbaa"

    def test_an_advanced_document_keeps_its_place_among_those_of_its_customer(
        self, kinds: Store
    ) -> None:
        old = submit(kinds).id
        claimed = claim_one(kinds)
        new = submit(kinds, kind="ocr").id

        advance(kinds, claimed)

        assert ids(claim(kinds, 2, kinds=["ocr"])) == [old, new]

    def test_a_document_older_than_the_claimed_ones_of_the_kind_is_claimed_next(
        self, kinds: Store
    ) -> None:
        old = submit(kinds).id
        claimed = claim_one(kinds)
        for _ in range(3):
            submit(kinds, kind="ocr")
        claim(kinds, 2, kinds=["ocr"])

        advance(kinds, claimed)

        assert ids(claim(kinds, 1, kinds=["ocr"])) == [old]

    def test_one_claim_records_a_step_and_takes_the_document_for_the_next(
        self, kinds: Store
    ) -> None:
        id = submit(kinds).id
        first = claim_one(kinds)

        again = claim_one(kinds, outcomes=[Advanced(first.fence, "ocr", "1")])

        assert (again.document.id, again.document.kind, again.previous) == (id, "ocr", "1")

    def test_an_advanced_document_is_always_counted_once(self, kinds: Store) -> None:
        def counted() -> dict[str, tuple[int, int]]:
            assert_numbers_are_exact(kinds)
            return {k.name: (k.waiting, k.running) for k in kinds.kinds() if k.waiting or k.running}

        submit(kinds)
        first = claim_one(kinds)
        assert counted() == {"default": (0, 1)}

        advance(kinds, first)
        assert counted() == {"ocr": (1, 0)}

        second = claim_one(kinds)
        assert counted() == {"ocr": (0, 1)}

        complete(kinds, [second])
        assert counted() == {}
        summary = kinds.summary()
        assert (summary.started, summary.completed, summary.retried) == (2, 1, 0)

    def test_a_step_ends_the_attempt_for_the_limit_of_the_customer(self, kinds: Store) -> None:
        adjust(kinds, "acme", limit=1)
        ended, other = submit(kinds).id, submit(kinds, kind="text").id
        claimed = claim_one(kinds)
        assert claim(kinds) == []

        advance(kinds, claimed)

        assert ids(claim(kinds, 2)) in ([ended], [other])
        assert claim(kinds) == []

    def test_a_step_frees_its_kind_and_waits_at_the_limit_of_the_next(self, kinds: Store) -> None:
        kinds.configure_kind("default", KindSettings(limit=1))
        kinds.configure_kind("ocr", KindSettings(limit=1))
        for _ in range(2):
            submit(kinds)
        first = claim_one(kinds)
        assert claim(kinds) == []

        advance(kinds, first)

        found = claim(kinds, 3)
        assert sorted(c.document.kind for c in found) == ["default", "ocr"]

    def test_attempts_start_again_with_each_step(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        store = with_kinds(open_store(clock=clock, settings=Settings(attempts_max=2)))
        id = submit(store).id
        fail(store, claim_one(store), retry_in_s=0)
        advance(store, claim_one(store))

        fail(store, claim_one(store), retry_in_s=0)
        assert (state(store, id), document(store, id).attempts) == (State.DELAYED, 1)
        fail(store, claim_one(store), retry_in_s=0)

        assert (state(store, id), document(store, id).attempts) == (State.DEAD, 2)

    def test_the_attempts_of_a_step_are_those_of_its_kind(self, kinds: Store) -> None:
        kinds.configure_kind("ocr", KindSettings(attempts_max=1))
        id = submit(kinds).id
        advance(kinds, claim_one(kinds))

        fail(kinds, claim_one(kinds), retry_in_s=0)

        assert state(kinds, id) is State.DEAD

    def test_an_expired_lease_returns_the_document_to_its_step(
        self, kinds: Store, clock: ManualClock
    ) -> None:
        id = submit(kinds).id
        advance(kinds, claim_one(kinds), value="1")
        claim_one(kinds)
        clock.advance(LEASE_S + 1)

        assert claim(kinds, kinds=["default"]) == []
        again = claim_one(kinds, kinds=["ocr"])

        assert (again.document.id, again.document.attempts, again.previous) == (id, 2, "1")

    def test_a_retry_of_a_dead_document_repeats_the_step_that_failed(self, kinds: Store) -> None:
        id = submit(kinds).id
        advance(kinds, claim_one(kinds), value="1", content=FILE)
        failed = claim_one(kinds)
        fail(kinds, failed)

        assert kinds.retry([id]) == [State.DEAD]

        again = claim_one(kinds, kinds=["ocr"])
        assert (again.document.step, again.document.attempts) == (1, 1)
        assert (again.previous, again.previous_content) == ("1", FILE)
        assert again.steps == failed.steps

    @pytest.mark.parametrize("kind", ["audio", "Ocr", "", "fairturn.x", "a\x00"])
    def test_a_document_that_names_no_kind_of_the_queue_is_dead_and_can_be_retried(
        self, kinds: Store, kind: str
    ) -> None:
        id = submit(kinds).id
        advance(kinds, claim_one(kinds))
        before = kinds.kinds()

        advance(kinds, claim_one(kinds), kind)

        dead = document(kinds, id)
        assert (dead.state, dead.kind, dead.step) == (State.DEAD, "ocr", 1)
        assert dead.error is not None
        assert "kind" in dead.error
        assert [k.name for k in kinds.kinds()] == [k.name for k in before]
        kinds.retry([id])
        advance(kinds, claim_one(kinds), "text")
        assert document(kinds, id).step == 2

    def test_an_open_queue_creates_the_kind_of_the_next_step(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        store = open_store(clock=clock, settings=OPEN)
        id = submit(store).id

        advance(store, claim_one(store), "audio")

        assert [k.name for k in store.kinds()] == ["audio", "default"]
        assert ids(claim(store, kinds=["audio"])) == [id]

    def test_a_step_to_a_kind_beyond_the_maximum_makes_the_document_dead(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        store = open_store(clock=clock, settings=OPEN)
        store.sign_on("w", 1, [f"kind-{n}" for n in range(KINDS_MAX - 1)])
        id = submit(store).id

        advance(store, claim_one(store), "one-more")

        dead = document(store, id)
        assert dead.state is State.DEAD
        assert dead.error is not None
        assert "100 kinds already" in dead.error

    def test_a_document_has_at_most_a_hundred_steps(self, kinds: Store) -> None:
        last = running_at_step(kinds, STEPS_MAX)

        advance(kinds, last)

        dead = document(kinds, last.document.id)
        assert (dead.state, dead.step) == (State.DEAD, STEPS_MAX)
        assert dead.error is not None
        assert "100 steps" in dead.error
        assert len(last.steps) == STEPS_MAX
        kinds.retry([dead.id])
        complete(kinds, claim(kinds))
        assert state(kinds, dead.id) is State.COMPLETED

    def test_a_value_may_have_one_mebibyte(self, kinds: Store) -> None:
        id = submit(kinds).id
        most = '"' + "x" * (STEP_VALUE_BYTES_MAX - 2) + '"'
        advance(kinds, claim_one(kinds), value=most)
        second = claim_one(kinds)

        advance(kinds, second, "text", value=most[:-1] + '\u00e9"')

        dead = document(kinds, id)
        assert second.previous == most
        assert (dead.state, dead.step) == (State.DEAD, 1)
        assert dead.error is not None
        assert "1,048,578 bytes" in dead.error
        assert [r.outcome for r in attempts(kinds, id)] == ["advanced", "failed"]

    def test_a_document_whose_cancellation_was_requested_does_not_advance(
        self, kinds: Store
    ) -> None:
        id = submit(kinds).id
        claimed = claim_one(kinds)
        kinds.cancel([id])

        advance(kinds, claimed)

        assert (state(kinds, id), document(kinds, id).step) == (State.CANCELLED, 0)
        assert attempts(kinds, id) == []

    def test_a_waiting_document_is_cancelled_in_any_step(self, kinds: Store) -> None:
        id = submit(kinds).id
        advance(kinds, claim_one(kinds))

        assert kinds.cancel([id]) == [State.CANCELLED]

        assert claim(kinds) == []
        assert_numbers_are_exact(kinds)

    def test_a_stale_step_changes_nothing(self, open_store: OpenStore, clock: ManualClock) -> None:
        store = open_store(clock=clock, settings=OPEN)
        id = submit(store).id
        stale = claim_one(store)
        clock.advance(LEASE_S + 1)
        claim_one(store)
        before, recorded = snapshot(store), attempts(store, id)

        lost = store.finish([Advanced(stale.fence, "audio", "1", FILE)])

        assert lost == [stale.fence]
        assert (snapshot(store), attempts(store, id)) == (before, recorded)
        assert [k.name for k in store.kinds()] == ["default"]
        assert store.unreferenced([FILE.name]) == [FILE.name]

    def test_a_step_is_recorded_once(self, kinds: Store) -> None:
        id = submit(kinds).id
        claimed = claim_one(kinds)
        outcome = Advanced(claimed.fence, "ocr", "1")

        assert kinds.finish([outcome]) == []
        assert kinds.finish([outcome]) == [claimed.fence]

        assert (document(kinds, id).step, len(attempts(kinds, id))) == (1, 1)

    def test_the_cost_of_a_step_is_learned_for_its_own_kind(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        settings = Settings(mode=Mode.EQUAL, costs=Costs.LEARNED)
        store = with_kinds(open_store(clock=clock, settings=settings))
        submit(store, "acme")
        submit(store, "bolt")
        for claimed in claim(store, 2):
            of_acme = claimed.document.customer == "acme"
            advance(store, claimed, real_cost=3_000_000 if of_acme else 1_000_000)
        complete(store, claim(store, 2))
        for kind in ("default", "text"):
            for _ in range(6):
                submit(store, "acme", kind=kind)
                submit(store, "bolt", kind=kind)

        assert customers_of(claim(store, 6, kinds=["default"])) == "bbabbb"
        assert customers_of(claim(store, 6, kinds=["text"])) == "ababab"

    def test_another_mode_keeps_the_steps_of_waiting_documents(self, kinds: Store) -> None:
        ids_of = [submit(kinds, customer).id for customer in "ab"]
        for claimed in claim(kinds, 2):
            advance(kinds, claimed, value="1")

        kinds.configure(Settings(mode=Mode.EQUAL))

        found = claim(kinds, 2, kinds=["ocr"])
        assert sorted(ids(found)) == sorted(ids_of)
        assert [c.previous for c in found] == ["1", "1"]

    def test_a_snapshot_sees_an_advanced_document_in_its_new_kind(self, kinds: Store) -> None:
        old = submit(kinds, "acme").id
        claimed = claim_one(kinds)
        submit(kinds, "acme", kind="ocr")
        last = submit(kinds, "acme", kind="ocr").id
        advance(kinds, claimed)

        assert [place(kinds, id).before.own for id in (old, last)] == [0, 2]
        assert ids(claim(kinds, 3, kinds=["ocr"]))[0] == old

    def test_the_duration_of_a_step_is_a_sample_for_its_own_kind(
        self, kinds: Store, clock: ManualClock
    ) -> None:
        submit(kinds)
        claimed = claim_one(kinds)
        clock.advance(5)
        advance(kinds, claimed)
        other, same = submit(kinds, kind="ocr").id, submit(kinds).id

        def durations(id: str) -> list[int | None]:
            samples = document_snapshot(kinds, id).service.attempts
            return [sample.duration for sample in samples]

        assert durations(same) == [5 * SECOND_US]
        assert durations(other) == []


class AttemptPromises(StoreSuite):
    """The stored attempts of a document."""

    def test_a_document_has_no_stored_attempts_at_first(self, kinds: Store) -> None:
        id = submit(kinds).id

        assert kinds.attempts(id) == []
        assert kinds.attempts("unknown") is None

    def test_failed_lost_and_advanced_attempts_are_stored(
        self, kinds: Store, clock: ManualClock
    ) -> None:
        id = submit(kinds).id
        first = claim_one(kinds, worker="first")
        clock.advance(1)
        kinds.finish([Failed(first.fence, "unreadable", 0, "Traceback: line 1")])
        claim_one(kinds, worker="second")
        clock.advance(LEASE_S + 1)
        third = claim_one(kinds, worker="third")
        clock.advance(2)
        advance(kinds, third, value='{"pages":3}', content=FILE)

        at = START + SECOND_US
        lost_at = at + (LEASE_S + 1) * SECOND_US
        expected = [
            AttemptRecord(
                0, "default", 1, "first", START, at, AttemptOutcome.FAILED, "unreadable",
                "Traceback: line 1",
            ),
            AttemptRecord(
                0, "default", 2, "second", at, lost_at, AttemptOutcome.LOST, LEASE_EXPIRED
            ),
            AttemptRecord(
                0, "default", 3, "third", lost_at, lost_at + 2 * SECOND_US,
                AttemptOutcome.ADVANCED, value='{"pages":3}', content=FILE,
            ),
        ]  # fmt: skip
        assert attempts(kinds, id, values=True) == expected
        assert attempts(kinds, id) == [record._replace(value=None) for record in expected]

    def test_the_last_failure_of_a_dead_document_is_stored(self, kinds: Store) -> None:
        id = submit(kinds).id

        fail(kinds, claim_one(kinds))

        (record,) = attempts(kinds, id)
        assert (record.attempt, record.outcome, record.error) == (1, "failed", "it failed")

    def test_attempts_that_complete_stop_or_return_a_document_are_not_stored(
        self, kinds: Store
    ) -> None:
        outcomes: list[type[Completed] | type[Released] | type[Stopped]]
        outcomes = [Completed, Released, Stopped]
        made = []
        for outcome in outcomes:
            made.append(submit(kinds, outcome.__name__).id)
            kinds.finish([outcome(claim_one(kinds).fence)])
            kinds.cancel(made)

        assert [attempts(kinds, id) for id in made] == [[], [], []]

    def test_attempts_that_end_a_cancelled_document_are_stored(
        self, kinds: Store, clock: ManualClock
    ) -> None:
        failed, lost = submit(kinds, "a").id, submit(kinds, "b").id
        claims = claim(kinds, 2)
        kinds.cancel([failed, lost])
        fail(kinds, claims[0], retry_in_s=0)
        clock.advance(LEASE_S + 1)
        claim(kinds)

        assert [r.outcome for id in (failed, lost) for r in attempts(kinds, id)] == [
            AttemptOutcome.FAILED,
            AttemptOutcome.LOST,
        ]
        assert state(kinds, lost) is State.CANCELLED

    def test_attempts_before_and_after_a_retry_are_stored(self, kinds: Store) -> None:
        id = submit(kinds).id
        fail(kinds, claim_one(kinds))
        kinds.retry([id])
        fail(kinds, claim_one(kinds))

        assert [(r.attempt, r.outcome) for r in attempts(kinds, id)] == [
            (1, "failed"),
            (1, "failed"),
        ]

    def test_the_end_of_long_details_is_stored(self, kinds: Store) -> None:
        id = submit(kinds).id
        details = "first line\x00" + "\u00e9" * DETAILS_BYTES_MAX + "\ud800last line"

        kinds.finish([Failed(claim_one(kinds).fence, "x", 0, details)])

        (record,) = attempts(kinds, id)
        assert record.details is not None
        assert record.details.endswith("\u00e9\ufffdlast line")
        assert DETAILS_BYTES_MAX - 2 < len(record.details.encode()) <= DETAILS_BYTES_MAX

    def test_the_oldest_attempts_that_are_no_steps_are_deleted(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        settings = Settings(attempts_max=1_000_000)
        store = with_kinds(open_store(clock=clock, settings=settings))
        id = submit(store).id
        advance(store, claim_one(store))
        for n in range(ATTEMPTS_STORED_MAX + 5):
            store.finish([Failed(claim_one(store).fence, f"failure {n}", 0)])

        found = attempts(store, id)

        assert len(found) == ATTEMPTS_STORED_MAX
        assert found[0].outcome is AttemptOutcome.ADVANCED
        assert [r.error for r in found[1:]] == [
            f"failure {n}" for n in range(6, ATTEMPTS_STORED_MAX + 5)
        ]
        assert claim_one(store).steps[0].kind == "default"

    def test_the_contents_of_steps_are_referenced_until_the_document_is_purged(
        self, kinds: Store
    ) -> None:
        id = submit(kinds, content_name="own").id
        other = FILE._replace(name="bb/other")
        advance(kinds, claim_one(kinds), content=FILE)
        advance(kinds, claim_one(kinds), "text", content=other)
        names = ["own", FILE.name, other.name, "unknown"]
        assert kinds.unreferenced(names) == ["unknown"]

        assert sorted(kinds.purge("acme")) == sorted(names[:3])

        assert kinds.unreferenced(names) == names
        assert kinds.attempts(id) is None

    def test_the_contents_of_steps_are_returned_when_the_document_is_pruned(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        store = with_kinds(open_store(clock=clock, settings=Settings(completed_kept_s=0)))
        submit(store)
        advance(store, claim_one(store), content=FILE)
        store.finish([Completed(claim_one(store).fence, content=FILE._replace(name="cc/result"))])
        clock.advance(1)

        assert sorted(prune_all(store)) == [FILE.name, "cc/result"]
        assert store.unreferenced([FILE.name]) == [FILE.name]

    def test_the_content_of_a_step_that_is_refused_is_not_referenced(self, kinds: Store) -> None:
        submit(kinds)

        advance(kinds, claim_one(kinds), "audio", content=FILE)

        assert kinds.unreferenced([FILE.name]) == [FILE.name]


class CheckpointPromises(StoreSuite):
    """`Store.renew` with checkpoints."""

    def stored(self, store: Store, claimed: Claim, checkpoint: str = '{"page":7}') -> Claim:
        renewed = store.renew(
            [claimed.fence], lease_us=LEASE_US, checkpoints={claimed.fence: checkpoint}
        )
        assert renewed == ([], [])
        return claimed

    def test_the_first_attempt_has_no_checkpoint(self, kinds: Store) -> None:
        submit(kinds)

        assert claim_one(kinds).checkpoint is None

    def test_a_checkpoint_survives_failures_releases_and_expired_leases(
        self, kinds: Store, clock: ManualClock
    ) -> None:
        submit(kinds)
        fail(kinds, self.stored(kinds, claim_one(kinds)), retry_in_s=0)
        second = claim_one(kinds)
        kinds.finish([Released(second.fence)])
        third = claim_one(kinds)
        clock.advance(LEASE_S + 1)
        fourth = claim_one(kinds)

        assert [c.checkpoint for c in (second, third, fourth)] == ['{"page":7}'] * 3

    def test_a_checkpoint_survives_the_death_and_the_retry_of_its_document(
        self, kinds: Store
    ) -> None:
        id = submit(kinds).id
        fail(kinds, self.stored(kinds, claim_one(kinds)))

        kinds.retry([id])

        assert claim_one(kinds).checkpoint == '{"page":7}'

    def test_the_last_checkpoint_counts_and_renewals_without_one_keep_it(
        self, kinds: Store
    ) -> None:
        submit(kinds)
        claimed = self.stored(kinds, claim_one(kinds))
        self.stored(kinds, claimed, "8")
        kinds.renew([claimed.fence], lease_us=LEASE_US)
        fail(kinds, claimed, retry_in_s=0)

        assert claim_one(kinds).checkpoint == "8"

    def test_the_end_of_its_step_deletes_a_checkpoint(self, kinds: Store) -> None:
        submit(kinds)
        advance(kinds, self.stored(kinds, claim_one(kinds)))
        second = claim_one(kinds)
        fail(kinds, second, retry_in_s=0)

        assert second.checkpoint is None
        assert claim_one(kinds).checkpoint is None

    def test_a_checkpoint_of_an_attempt_that_lost_its_lease_is_not_stored(
        self, kinds: Store, clock: ManualClock
    ) -> None:
        submit(kinds)
        stale = claim_one(kinds)
        clock.advance(LEASE_S + 1)
        current = self.stored(kinds, claim_one(kinds), "1")

        renewed = kinds.renew([stale.fence], lease_us=LEASE_US, checkpoints={stale.fence: "2"})

        assert renewed.lost == [stale.fence]
        fail(kinds, current, retry_in_s=0)
        assert claim_one(kinds).checkpoint == "1"

    def test_a_checkpoint_of_an_attempt_that_is_not_renewed_is_ignored(self, kinds: Store) -> None:
        submit(kinds, "a")
        submit(kinds, "b")
        first, second = claim(kinds, 2)

        kinds.renew([first.fence], lease_us=LEASE_US, checkpoints={second.fence: "1"})
        fail(kinds, second, retry_in_s=0)

        assert claim_one(kinds).checkpoint is None

    def test_checkpoints_of_several_attempts_are_stored_in_one_renewal(self, kinds: Store) -> None:
        for customer in "abc":
            submit(kinds, customer)
        claims = claim(kinds, 3)
        values: dict[Fence, str] = {c.fence: f'"{c.document.customer}"' for c in claims[:2]}

        kinds.renew([c.fence for c in claims], lease_us=LEASE_US, checkpoints=values)
        outcomes: list[Outcome] = [Released(c.fence) for c in claims]
        found = {c.document.customer: c.checkpoint for c in claim(kinds, 3, outcomes=outcomes)}

        assert found == {"a": '"a"', "b": '"b"', "c": None}

    @pytest.mark.parametrize(
        ("checkpoint", "error"),
        [('"' + "x" * CHECKPOINT_BYTES_MAX + '"', "65,538 bytes"), ('"\x00"', "NUL")],
    )
    def test_a_checkpoint_that_cannot_be_stored_raises_and_renews_nothing(
        self, kinds: Store, clock: ManualClock, checkpoint: str, error: str
    ) -> None:
        submit(kinds)
        claimed = claim_one(kinds)
        clock.advance(LEASE_S - 1)

        with pytest.raises(ValueError, match=error):
            kinds.renew([claimed.fence], lease_us=LEASE_US, checkpoints={claimed.fence: checkpoint})

        clock.advance(2)
        assert claim_one(kinds).checkpoint is None
