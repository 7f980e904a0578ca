"""Kinds of work: which documents a claim takes, turns of kinds, and settings of a kind."""

import pytest

from fairturn.clock import ManualClock
from fairturn.errors import KindRefused, QueueFull
from fairturn.model import (
    DEFAULT_KIND_NAME,
    KINDS_MAX,
    Failed,
    Filter,
    KindPolicy,
    KindSettings,
    Released,
    Settings,
    State,
)
from fairturn.scheduling.flows import Mode
from fairturn.stores.conformance.steps import (
    LEASE_S,
    adjust,
    assert_numbers_are_exact,
    claim,
    claim_one,
    complete,
    customers_of,
    document,
    fail,
    find_all,
    ids,
    new,
    snapshot,
    state,
    submit,
)
from fairturn.stores.conformance.suite import OpenStore, StoreSuite
from fairturn.stores.contract import QueueStore as Store

OPEN = Settings(kinds=KindPolicy.OPEN)


class KindPromises(StoreSuite):
    """Kinds of work."""

    def test_a_queue_has_the_default_kind(self, store: Store) -> None:
        submit(store)

        (kind,) = store.kinds()

        assert (kind.name, kind.settings) == (DEFAULT_KIND_NAME, KindSettings())
        assert (kind.waiting, kind.running) == (1, 0)

    def test_a_submission_to_an_unknown_kind_is_refused_and_changes_nothing(
        self, store: Store
    ) -> None:
        submit(store)
        before = snapshot(store)

        with pytest.raises(KindRefused, match="no kind 'ocr'.*kinds set ocr"):
            store.submit([new(), new(kind="ocr")])

        assert snapshot(store) == before
        assert [kind.name for kind in store.kinds()] == [DEFAULT_KIND_NAME]

    def test_an_open_queue_creates_the_kinds_that_submissions_name(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        store = open_store(clock=clock, settings=OPEN)

        id = submit(store, kind="ocr").id

        assert document(store, id).kind == "ocr"
        assert [kind.name for kind in store.kinds()] == [DEFAULT_KIND_NAME, "ocr"]

    def test_a_submission_that_is_refused_creates_no_kind(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        settings = Settings(kinds=KindPolicy.OPEN, waiting_max=1)
        store = open_store(clock=clock, settings=settings)

        with pytest.raises(QueueFull):
            store.submit([new(kind="ocr"), new(kind="text")])

        assert [kind.name for kind in store.kinds()] == [DEFAULT_KIND_NAME]

    def test_the_refusal_of_several_unknown_kinds_names_the_first_by_name(
        self, store: Store
    ) -> None:
        with pytest.raises(KindRefused, match="no kind 'ocr'"):
            store.submit([new(kind="text"), new(kind="ocr")])

    def test_a_worker_that_signs_on_creates_the_kinds_that_it_serves(self, store: Store) -> None:
        store.sign_on("w", 4, ["text", "ocr"])

        assert [kind.name for kind in store.kinds()] == [DEFAULT_KIND_NAME, "ocr", "text"]
        (worker,) = store.workers()
        assert worker.kinds == ("ocr", "text")

    def test_a_worker_without_kinds_serves_every_kind(self, store: Store) -> None:
        store.sign_on("w", 4)

        (worker,) = store.workers()

        assert worker.kinds is None
        assert worker.serves("ocr")

    def test_a_queue_has_at_most_a_hundred_kinds(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        store = open_store(clock=clock, settings=OPEN)
        store.sign_on("w", 1, [f"kind-{n}" for n in range(KINDS_MAX - 1)])

        with pytest.raises(KindRefused, match="100 kinds already"):
            submit(store, kind="one-more")
        with pytest.raises(KindRefused, match="100 kinds already"):
            store.configure_kind("one-more", KindSettings())
        with pytest.raises(KindRefused, match="100 kinds already"):
            store.sign_on("w", 1, ["one-more"])

        assert len(store.kinds()) == KINDS_MAX
        id = submit(store, kind=f"kind-{KINDS_MAX - 2}").id
        assert ids(claim(store)) == [id]

    def test_a_claim_takes_only_documents_of_the_kinds_that_it_serves(self, kinds: Store) -> None:
        first = submit(kinds, kind="ocr").id
        second = submit(kinds, kind="text").id
        third = submit(kinds).id

        assert ids(claim(kinds, 3, kinds=["text"])) == [second]
        assert ids(claim(kinds, 3, kinds=["text"])) == []
        assert ids(claim(kinds, 3, kinds=["ocr", "text", "unknown"])) == [first]
        assert ids(claim(kinds, 3)) == [third]

    def test_a_claim_of_no_kinds_takes_nothing(self, kinds: Store) -> None:
        submit(kinds)

        assert claim(kinds, 1, kinds=[]) == []

    def test_a_claim_takes_at_most_the_requested_number_of_a_kind(self, kinds: Store) -> None:
        for customer in "abc":
            submit(kinds, customer, kind="ocr")
            submit(kinds, customer, kind="text")

        found = claim(kinds, 6, at_most={"ocr": 1, "text": 2, "unknown": 1})

        assert sorted(c.document.kind for c in found) == ["ocr", "text", "text"]
        assert claim(kinds, 6, at_most={"ocr": 0, "text": 0}) == []
        found = claim(kinds, 6, kinds=["ocr"], at_most={"text": 1})
        assert [c.document.kind for c in found] == ["ocr", "ocr"]

    def test_a_claim_of_every_kind_takes_kinds_that_are_created_later(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        store = open_store(clock=clock, settings=OPEN)
        assert claim(store) == []

        id = submit(store, kind="ocr").id

        (claimed,) = claim(store)
        assert claimed.document.id == id
        assert claimed.document.kind == "ocr"

    def test_the_count_of_a_customer_spans_kinds(self, kinds: Store) -> None:
        receipts = [submit(kinds, kind=kind) for kind in ("ocr", "text", "default", "ocr")]

        assert [receipt.count for receipt in receipts] == [0, -1, -2, -3]

    def test_customers_take_turns_within_each_kind(self, kinds: Store) -> None:
        for _ in range(3):
            submit(kinds, "acme", kind="ocr")
        submit(kinds, "bolt", kind="ocr")
        submit(kinds, "acme", kind="text")

        assert customers_of(claim(kinds, 4, kinds=["ocr"])) == "abaa"

    def test_a_backlog_of_one_kind_does_not_starve_another_on_a_general_worker(
        self, kinds: Store
    ) -> None:
        for _ in range(3):
            submit(kinds, "acme", kind="ocr")
        for _ in range(3):
            submit(kinds, "bolt", kind="text")

        found = [claimed.document.kind for claimed in claim(kinds, 6)]

        assert found == ["ocr", "text"] * 3

    def test_a_better_level_goes_before_the_turns_of_kinds(self, kinds: Store) -> None:
        burst = [submit(kinds, "acme", kind="ocr") for _ in range(5)]
        assert [receipt.priority for receipt in burst] == [1, 1, 1, 2, 2]
        submit(kinds, "bolt", kind="text")
        submit(kinds, "bolt", kind="text")

        found = [claimed.document.kind for claimed in claim(kinds, 7)]

        assert found == ["ocr", "text", "ocr", "text", "ocr", "ocr", "ocr"]

    def test_mode_levels_serves_kinds_by_level_and_order(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        store = open_store(clock=clock, settings=Settings(mode=Mode.LEVELS, kinds=KindPolicy.OPEN))
        expected = [submit(store, "acme", kind=kind).id for kind in ("ocr", "ocr", "text")]
        expected.append(submit(store, "bolt", kind="ocr").id)

        assert ids(claim(store, 4)) == expected

    def test_a_customer_at_its_limit_is_held_in_every_kind(self, kinds: Store) -> None:
        adjust(kinds, "acme", limit=1)
        submit(kinds, kind="ocr")
        later = submit(kinds, kind="text").id
        (first,) = claim(kinds, 1, kinds=["ocr"])

        assert claim(kinds, 1, kinds=["text"]) == []
        complete(kinds, [first])
        assert ids(claim(kinds, 1, kinds=["text"])) == [later]

    def test_a_paused_kind_is_not_claimed_and_others_are(self, kinds: Store) -> None:
        kinds.configure_kind("ocr", KindSettings(paused=True))
        held = submit(kinds, kind="ocr").id
        submit(kinds, "bolt", kind="text")

        assert customers_of(claim(kinds, 2)) == "b"
        assert state(kinds, held) is State.WAITING
        kinds.configure_kind("ocr", KindSettings())
        assert ids(claim(kinds, 2)) == [held]

    def test_the_limit_of_a_kind_holds_over_all_claims(self, kinds: Store) -> None:
        kinds.configure_kind("ocr", KindSettings(limit=2))
        for customer in "abcd":
            submit(kinds, customer, kind="ocr")
        submit(kinds, "e", kind="text")

        first = claim(kinds, 1, worker="one")
        second = claim(kinds, 4, worker="two")

        assert sorted(c.document.kind for c in (*first, *second)) == ["ocr", "ocr", "text"]
        assert claim(kinds, 4) == []
        complete(kinds, first)
        assert len(claim(kinds, 4)) == 1

    def test_a_lease_that_expired_makes_room_in_a_limited_kind(
        self, kinds: Store, clock: ManualClock
    ) -> None:
        kinds.configure_kind("ocr", KindSettings(limit=1))
        first = submit(kinds, kind="ocr").id
        submit(kinds, kind="ocr")
        assert ids(claim(kinds, 2)) == [first]

        clock.advance(LEASE_S + 1)

        assert ids(claim(kinds, 2)) == [first]

    def test_a_limit_below_the_running_documents_lets_them_finish(self, kinds: Store) -> None:
        for _ in range(3):
            submit(kinds, kind="ocr")
        running = claim(kinds, 2)
        kinds.configure_kind("ocr", KindSettings(limit=1))

        assert claim(kinds, 1) == []
        complete(kinds, running[:1])
        assert claim(kinds, 1) == []
        complete(kinds, running[1:])
        assert len(claim(kinds, 1)) == 1

    def test_a_kind_has_its_own_maximum_of_attempts(self, kinds: Store, clock: ManualClock) -> None:
        kinds.configure_kind("ocr", KindSettings(attempts_max=1))
        failing = submit(kinds, "acme", kind="ocr").id
        lost = submit(kinds, "bolt", kind="ocr").id
        other = submit(kinds, "corp", kind="text").id
        claims = claim(kinds, 3)

        for claimed in claims:
            if claimed.document.id != lost:
                fail(kinds, claimed, retry_in_s=1)
        clock.advance(LEASE_S + 1)
        claim(kinds, 1, kinds=[])

        assert state(kinds, failing) is State.DEAD
        assert state(kinds, lost) is State.DEAD
        assert state(kinds, other) is State.WAITING

    def test_settings_of_a_kind_are_compared_before_they_are_replaced(self, kinds: Store) -> None:
        assert kinds.configure_kind("ocr", KindSettings(limit=3), expected=KindSettings())

        assert not kinds.configure_kind("ocr", KindSettings(limit=4), expected=KindSettings())

        (ocr,) = (kind for kind in kinds.kinds() if kind.name == "ocr")
        assert ocr.settings == KindSettings(limit=3)

    def test_an_unknown_kind_is_not_created_if_its_settings_are_not_replaced(
        self, kinds: Store
    ) -> None:
        assert not kinds.configure_kind("new", KindSettings(), expected=KindSettings(limit=1))
        assert "new" not in [kind.name for kind in kinds.kinds()]

        assert kinds.configure_kind("new", KindSettings(limit=1), expected=KindSettings())

        (new_kind,) = (kind for kind in kinds.kinds() if kind.name == "new")
        assert new_kind.settings == KindSettings(limit=1)

    def test_documents_that_return_keep_their_kind_and_order(
        self, kinds: Store, clock: ManualClock
    ) -> None:
        first = submit(kinds, kind="ocr").id
        second = submit(kinds, kind="ocr").id
        released, failed = claim(kinds, 2, kinds=["ocr"])
        assert (
            kinds.finish([Released(released.fence), Failed(failed.fence, "it failed", 1_000_000)])
            == []
        )
        clock.advance(2)

        assert claim(kinds, 2, kinds=["text"]) == []
        assert ids(claim(kinds, 2, kinds=["ocr"])) == [first, second]

    def test_a_dead_document_is_retried_in_its_kind(self, kinds: Store) -> None:
        id = submit(kinds, kind="ocr").id
        fail(kinds, claim_one(kinds))

        assert kinds.retry([id]) == [State.DEAD]

        assert claim(kinds, 1, kinds=["text"]) == []
        assert ids(claim(kinds, 1, kinds=["ocr"])) == [id]

    def test_a_delayed_document_waits_for_its_kind(self, kinds: Store, clock: ManualClock) -> None:
        id = submit(kinds, kind="ocr", due_at=clock.now() + 5_000_000).id
        clock.advance(6)

        assert claim(kinds, 1, kinds=["default"]) == []
        assert ids(claim(kinds, 1, kinds=["ocr"])) == [id]

    def test_kinds_state_their_waiting_and_running_documents(self, kinds: Store) -> None:
        receipts = [submit(kinds, kind="ocr") for _ in range(4)]
        submit(kinds, "bolt")
        kinds.cancel([receipts[3].id])
        claim(kinds, 1, kinds=["ocr"])

        found = {kind.name: (kind.waiting, kind.running) for kind in kinds.kinds()}

        assert found == {"default": (1, 0), "ocr": (2, 1), "text": (0, 0)}
        assert_numbers_are_exact(kinds)

    def test_documents_are_found_by_kind(self, kinds: Store) -> None:
        first = submit(kinds, kind="ocr").id
        second = submit(kinds, kind="text").id
        third = submit(kinds, kind="ocr").id
        kinds.cancel([third])

        assert ids(find_all(kinds, Filter(kinds=("ocr",)))) == [third, first]
        assert ids(find_all(kinds, Filter(kinds=("ocr", "text")), size=1)) == [third, second, first]
        assert find_all(kinds, Filter(kinds=("unknown",))) == []

    def test_lanes_are_of_one_kind_or_of_all(self, kinds: Store) -> None:
        first = submit(kinds, "acme", kind="ocr").id
        second = submit(kinds, "bolt", kind="ocr").id
        third = submit(kinds, "corp", kind="text").id

        assert ids(kinds.lanes(kind="ocr").upcoming[0]) == [first, second]
        assert ids(kinds.lanes(kind="text").upcoming[0]) == [third]
        assert ids(kinds.lanes(kind="unknown").upcoming[0]) == []
        expected = kinds.lanes().upcoming[0]
        assert ids(expected) == ids(claim(kinds, 3))

    def test_lanes_of_all_kinds_foresee_the_turns_of_a_kind_that_becomes_active(
        self, kinds: Store
    ) -> None:
        for _ in range(3):
            submit(kinds, "acme", kind="text")
        claim(kinds, 2)
        for _ in range(3):
            submit(kinds, "bolt", kind="ocr")

        expected = ids(kinds.lanes().upcoming[0])

        assert ids(claim(kinds, 4)) == expected

    def test_a_change_of_mode_keeps_kinds(self, kinds: Store) -> None:
        submit(kinds, "acme", kind="ocr")
        submit(kinds, "acme", kind="text")
        submit(kinds, "bolt", kind="ocr")
        claim(kinds, 1, kinds=["ocr"])

        kinds.configure(Settings(mode=Mode.EQUAL))

        assert [c.document.kind for c in claim(kinds, 2, kinds=["ocr"])] == ["ocr"]
        assert [c.document.kind for c in claim(kinds, 2)] == ["text"]

    def test_patience_is_counted_by_kind(self, kinds: Store, clock: ManualClock) -> None:
        """The tenth claim of a kind takes its longest waiting document; claims of other kinds
        do not count."""
        for _ in range(25):
            submit(kinds, "acme")  # sinks to level 9
        old = submit(kinds, "acme", kind="ocr").id
        clock.advance(200)
        for n in range(12):
            submit(kinds, f"quiet-{n}", kind="ocr")
            submit(kinds, f"other-{n}", kind="text")

        assert customers_of(claim(kinds, 9, kinds=["text"])) == "o" * 9
        assert customers_of(claim(kinds, 9, kinds=["ocr"])) == "q" * 9
        assert ids(claim(kinds, 1, kinds=["ocr"])) == [old]

    def test_a_purge_and_a_prune_leave_no_document_of_any_kind(
        self, kinds: Store, clock: ManualClock
    ) -> None:
        submit(kinds, "acme", kind="ocr")
        submit(kinds, "bolt", kind="text")
        claim(kinds, 1, kinds=["ocr"])

        kinds.purge("acme")

        assert customers_of(claim(kinds, 5)) == "b"
        found = {kind.name: (kind.waiting, kind.running) for kind in kinds.kinds()}
        assert found == {"default": (0, 0), "ocr": (0, 0), "text": (0, 1)}

    def test_a_snapshot_sees_the_documents_of_its_own_kind(self, kinds: Store) -> None:
        for _ in range(3):
            submit(kinds, "acme", kind="ocr")
        submit(kinds, "bolt", kind="text")
        id = submit(kinds, "corp", kind="ocr").id
        kinds.sign_on("readers", 2, ["text"])
        kinds.sign_on("general", 3)

        snapshot = kinds.snapshot(id)

        assert snapshot is not None
        assert snapshot.queue_view is not None
        assert snapshot.queue_view.waiting == 4
        assert [seen.worker for seen in snapshot.service.workers] == ["general"]

    def test_a_snapshot_counts_the_live_workers_of_other_kinds(
        self, kinds: Store, clock: ManualClock
    ) -> None:
        id = submit(kinds, kind="ocr").id
        kinds.sign_on("gone", 2, ["text"])
        clock.advance(60)
        kinds.sign_on("readers", 2, ["text"])
        kinds.sign_on("general", 3)

        snapshot = kinds.snapshot(id)

        assert snapshot is not None
        assert snapshot.service.other_workers == 1
