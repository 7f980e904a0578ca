"""Submissions: the rule for each document, atomic calls, idempotency keys, parents."""

import hashlib
import threading
from dataclasses import replace
from itertools import groupby

import pytest

from fairturn.clock import SECOND_US, ManualClock
from fairturn.errors import KeyReused, NotFound
from fairturn.model import (
    CUSTOMER_BYTES_MAX,
    ENDED,
    BodyType,
    Settings,
    State,
)
from fairturn.scheduling.flows import Mode
from fairturn.stores.conformance.steps import (
    BODY,
    START,
    claim,
    claim_each,
    claim_one,
    complete,
    customer,
    document,
    fail,
    find_all,
    ids,
    make,
    new,
    prune_all,
    snapshot,
    submit,
)
from fairturn.stores.conformance.suite import OpenStore, StoreSuite
from fairturn.stores.conformance.vectors import PriorityCase
from fairturn.stores.contract import QueueStore as Store

# Literal values: imported constants would hide a mistaken change.
CHILDREN_WITHOUT_A_CHECK = 20
DAY_US = 24 * 3_600 * SECOND_US
DIGEST, OTHER_DIGEST = b"\x01" * 32, b"\x02" * 32

# Names that a store may wrongly merge, truncate or misread.
ODD_NAMES = [
    "ACME",
    "acme",
    "acme ",
    " acme",
    "caf\u00e9",
    "cafe\u0301",
    "\U0001f9fe\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\u202eemca",
    "\u0645\u0631\u062d\u0628\u0627",
    "\u6f22\u5b57",
    "\ufeffacme",
    "\uffff",
    "\U0010ffff",
    "a\tb\r\nc\x1b[0m\x7f",
    "'; DROP TABLE documents; --",
    '"quoted"',
    "100%_*?",
    "None",
    "0",
    "-1",
    "../../etc",
    "x" * CUSTOMER_BYTES_MAX,
    "\u00e9" * (CUSTOMER_BYTES_MAX // 2),
]


class SubmitPromises(StoreSuite):
    """`Store.submit`."""

    # ── The rule ─────────────────────────────────────────────────────────────────────────────────

    def test_every_check_of_the_vectors_has_exactly_their_answer(
        self, open_store: OpenStore, priority_case: PriorityCase
    ) -> None:
        clock = ManualClock()
        store = open_store(clock=clock, settings=priority_case.settings)

        answers = []
        for check in priority_case.checks:
            clock.set(check.at)
            receipt = submit(store, check.customer)
            answers.append(replace(check, count=receipt.count, priority=receipt.priority))

        assert tuple(answers) == priority_case.checks

    def test_documents_of_one_call_are_checked_one_after_the_other_in_the_order_given(
        self, open_store: OpenStore, priority_case: PriorityCase
    ) -> None:
        clock = ManualClock()
        store = open_store(clock=clock, settings=priority_case.settings)

        answers = []
        for at, checks in groupby(priority_case.checks, key=lambda check: check.at):
            clock.set(at)
            receipts = store.submit([new(check.customer) for check in checks])
            answers += [(receipt.count, receipt.priority) for receipt in receipts]

        assert answers == [(check.count, check.priority) for check in priority_case.checks]

    def test_threads_that_submit_at_once_for_one_customer_get_the_counts_of_a_sequence(
        self, store: Store
    ) -> None:
        counts: list[int] = []
        start = threading.Barrier(8)

        def submit_some() -> None:
            start.wait()
            counts.extend(submit(store).count for _ in range(5))

        threads = [threading.Thread(target=submit_some) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert sorted(counts, reverse=True) == [-n for n in range(40)]
        assert customer(store, "acme").count == -39

    def test_a_document_that_is_done_gives_no_count_back(self, store: Store) -> None:
        submit(store)
        complete(store, [claim_one(store)])

        assert submit(store).count == -1

    def test_a_reset_leaves_the_priorities_of_waiting_documents_alone(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        store = open_store(clock=clock, settings=Settings(mode=Mode.LEVELS))
        waiting = store.submit([new()] * 5)
        clock.advance(1_501)

        first = submit(store)

        assert (first.count, first.priority) == (0, 1)
        assert [document(store, id).priority for id in ids(waiting)] == [1, 1, 1, 2, 2]
        assert ids(claim_each(store)) == ids([*waiting[:3], first, *waiting[3:]])

    # ── What is stored ───────────────────────────────────────────────────────────────────────────

    def test_a_receipt_contains_what_was_stored(self, store: Store) -> None:
        submit(store)
        receipt = submit(store)

        stored = document(store, receipt.id)

        assert receipt[1:] == ("acme", -1, 1, START, False)
        assert (stored.customer, stored.count, stored.priority) == ("acme", -1, 1)
        assert (stored.submitted_at_us, stored.state) == (START, State.WAITING)
        assert (stored.attempts, stored.claimed_at_us, stored.ended_at_us) == (0, None, None)
        assert (stored.worker, stored.error, stored.cancel_requested) == (None, None, False)

    def test_a_document_is_read_back_as_it_was_submitted(self, store: Store) -> None:
        parent = submit(store)
        sha256 = hashlib.sha256(b"\x00\xff").digest()
        full = new(
            body=b"\x00\xff",
            body_type=BodyType.CONTENT,
            size_bytes=2,
            sha256=sha256,
            name="invoice \u2116 1.pdf",
            metadata='{"pages": 3}',
            cost=2_500_000,
            due_at=START + 1,
            key="k",
            digest=DIGEST,
            parent=parent.id,
        )

        (receipt,) = store.submit([full])

        stored = store.read(receipt.id)
        assert stored is not None
        assert (stored.body, stored.result, stored.result_content) == (b"\x00\xff", None, None)
        found = stored.document
        assert (found.body_type, found.size_bytes, found.sha256) == (BodyType.CONTENT, 2, sha256)
        assert (found.name, found.metadata) == ("invoice \u2116 1.pdf", {"pages": 3})
        assert (found.cost, found.due_at_us, found.parent) == (2_500_000, START + 1, parent.id)
        assert found.content_name is None

    @pytest.mark.parametrize(
        "body", ["", "null", BODY, "\u2028\U0001f4c4", "x" * 100_000, b"", b"\x00" * 70_000, None]
    )
    def test_a_body_comes_back_as_the_text_or_the_bytes_that_it_was(
        self, store: Store, body: str | bytes | None
    ) -> None:
        content_name = "aa/one" if body is None else None
        size_bytes = 1_000_000 if body is None else len(body)

        receipt = submit(store, body=body, content_name=content_name, size_bytes=size_bytes)

        stored = store.read(receipt.id)
        assert stored is not None
        assert (stored.body, stored.document.size_bytes) == (body, size_bytes)
        assert stored.document.content_name == content_name
        assert claim_one(store).body == body

    def test_bodies_of_one_call_stay_with_their_documents(self, store: Store) -> None:
        sizes = [0, 70_000, 1, 5_000, 200_000, 100, 40_000]
        bodies = [f"{n % 10}" * size for n, size in enumerate(sizes)]

        store.submit([new(body=body, size_bytes=len(body)) for body in bodies])

        assert [claimed.body for claimed in claim(store, 10)] == bodies

    def test_documents_of_one_call_wait_in_the_order_given(self, store: Store) -> None:
        receipts = store.submit([new(f"customer {n % 7}") for n in range(300)])

        orders = [document(store, receipt.id).order for receipt in receipts]

        assert len(set(ids(receipts))) == 300
        assert None not in orders
        assert orders == sorted(set(orders), key=lambda order: order or 0)

    def test_customers_whose_names_look_alike_are_different_customers(self, store: Store) -> None:
        receipts = store.submit([new(name) for name in ODD_NAMES])

        assert [receipt.count for receipt in receipts] == [0] * len(ODD_NAMES)
        assert [receipt.customer for receipt in receipts] == ODD_NAMES
        assert [document(store, id).customer for id in ids(receipts)] == ODD_NAMES
        assert [customer(store, name).name for name in ODD_NAMES] == ODD_NAMES

    def test_submitting_nothing_changes_nothing(self, store: Store) -> None:
        before = snapshot(store)

        assert store.submit([]) == []

        assert snapshot(store) == before

    def test_a_connection_of_the_caller_is_refused_by_an_embedded_store(self, store: Store) -> None:
        if self.takes_connections:
            pytest.skip("this store takes part in transactions of the caller")

        with pytest.raises(ValueError, match="transaction"):
            store.submit([new()], connection=object())

        assert find_all(store) == []

    # ── Idempotency keys ─────────────────────────────────────────────────────────────────────────

    def test_a_known_key_gives_its_first_receipt_again_and_makes_no_check(
        self, store: Store, clock: ManualClock
    ) -> None:
        first = submit(store, key="k", digest=DIGEST)
        clock.advance(60)

        again = submit(store, key="k", digest=DIGEST)

        assert again == first._replace(replayed=True)
        assert len(find_all(store)) == 1
        assert customer(store, "acme").count_updated_at_us == START
        assert submit(store).count == -1

    def test_a_known_key_with_another_digest_is_refused(self, store: Store) -> None:
        first = submit(store, key="k", digest=DIGEST)
        before = snapshot(store)

        with pytest.raises(KeyReused, match=f"'k'.*'acme'.*{first.id}"):
            submit(store, key="k", digest=OTHER_DIGEST)

        assert snapshot(store) == before

    def test_a_key_belongs_to_one_customer(self, store: Store) -> None:
        first = submit(store, "acme", key="k", digest=DIGEST)

        other = submit(store, "bolt", key="k", digest=OTHER_DIGEST)

        assert not other.replayed
        assert other.id != first.id

    def test_a_key_is_known_for_24_hours_and_not_longer(
        self, store: Store, clock: ManualClock
    ) -> None:
        first = submit(store, key="k", digest=DIGEST)

        clock.set(START + DAY_US)
        prune_all(store)
        assert submit(store, key="k", digest=DIGEST).id == first.id

        clock.set(START + DAY_US + 1)
        later = submit(store, key="k", digest=OTHER_DIGEST)
        assert (later.replayed, later.id != first.id) == (False, True)
        assert submit(store, key="k", digest=OTHER_DIGEST).id == later.id

    def test_a_key_that_comes_twice_in_one_call_is_one_document(self, store: Store) -> None:
        keyed = new(key="k", digest=DIGEST)

        first, second, third = store.submit([keyed, new(), keyed])

        assert third == first._replace(replayed=True)
        assert (first.count, second.count) == (0, -1)
        assert len(find_all(store)) == 2

    def test_a_key_that_comes_twice_in_one_call_with_two_digests_refuses_the_call(
        self, store: Store
    ) -> None:
        before = snapshot(store)

        with pytest.raises(KeyReused):
            store.submit([new(key="k", digest=DIGEST), new(key="k", digest=OTHER_DIGEST)])

        assert snapshot(store) == before

    def test_a_key_of_a_refused_call_is_not_taken(self, store: Store) -> None:
        with pytest.raises(NotFound):
            store.submit([new(key="k", digest=DIGEST), new(parent="no such document")])

        later = submit(store, key="k", digest=OTHER_DIGEST)

        assert not later.replayed

    @pytest.mark.parametrize("ended", ENDED)
    def test_a_key_is_known_when_its_document_has_ended(
        self, store: Store, clock: ManualClock, ended: State
    ) -> None:
        id = make(store, ended, clock, key="k", digest=DIGEST)

        again = submit(store, f"a-{ended}-one", key="k", digest=DIGEST)

        assert (again.id, again.replayed) == (id, True)
        assert document(store, id).state is ended

    def test_a_key_outlives_its_document_and_the_idleness_of_its_customer(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        store = open_store(clock=clock, settings=Settings(completed_kept_s=0))
        first = submit(store, key="k", digest=DIGEST)
        complete(store, [claim_one(store)])
        clock.advance(3_600)
        assert store.claim(1, worker="w", lease_us=1) == ([], [], [])

        prune_all(store)

        assert store.read(first.id) is None
        assert submit(store, key="k", digest=DIGEST) == first._replace(replayed=True)
        with pytest.raises(KeyReused):
            submit(store, key="k", digest=OTHER_DIGEST)

    # ── Parents ──────────────────────────────────────────────────────────────────────────────────

    def test_a_document_with_a_parent_takes_its_count_and_priority_without_a_check(
        self, store: Store, clock: ManualClock
    ) -> None:
        parent = store.submit([new()] * 10)[-1]
        clock.advance(3_600)

        child = submit(store, parent=parent.id)

        assert (child.count, child.priority) == (parent.count, parent.priority) == (-9, 5)
        assert customer(store, "acme").count_updated_at_us == START
        assert submit(store).count == 0

    def test_only_the_first_20_documents_of_a_parent_make_no_check(self, store: Store) -> None:
        parent = submit(store)

        children = [submit(store, parent=parent.id).count for _ in range(23)]

        assert children == [0] * CHILDREN_WITHOUT_A_CHECK + [-1, -2, -3]

    def test_only_the_first_20_documents_of_a_parent_in_one_call_make_no_check(
        self, store: Store
    ) -> None:
        first, second = store.submit([new(), new()])
        submit(store, parent=first.id)

        receipts = store.submit([new(parent=first.id)] * 21 + [new(parent=second.id)])

        assert [r.count for r in receipts] == [0] * (CHILDREN_WITHOUT_A_CHECK - 1) + [-2, -3, -1]

    def test_a_document_that_ended_can_still_be_a_parent(self, store: Store) -> None:
        parent = store.submit([new()] * 4)[-1]
        assert store.cancel([parent.id]) == [State.CANCELLED]

        assert submit(store, parent=parent.id)[2:4] == (-3, 2)

    def test_a_child_is_a_parent_like_any_other(self, store: Store) -> None:
        parent = store.submit([new()] * 4)[-1]
        child = submit(store, parent=parent.id)
        for _ in range(CHILDREN_WITHOUT_A_CHECK):
            submit(store, parent=parent.id)

        grandchild = submit(store, parent=child.id)

        assert (grandchild.count, grandchild.priority) == (-3, 2)

    @pytest.mark.parametrize("parent", ["", "no such document", "0" * 15, "f" * 15])
    def test_a_parent_that_does_not_exist_is_refused(self, store: Store, parent: str) -> None:
        submit(store)
        before = snapshot(store)

        with pytest.raises(NotFound, match="parent"):
            submit(store, parent=parent)

        assert snapshot(store) == before

    def test_a_parent_of_another_customer_is_refused_like_one_that_does_not_exist(
        self, store: Store
    ) -> None:
        foreign = submit(store, "bolt")
        before = snapshot(store)

        with pytest.raises(NotFound) as refused:
            submit(store, "acme", parent=foreign.id)

        assert "bolt" not in str(refused.value)
        assert snapshot(store) == before

    def test_a_refused_or_repeated_document_is_none_of_the_20(self, store: Store) -> None:
        parent = submit(store)
        submit(store, parent=parent.id, key="k", digest=DIGEST)
        for _ in range(30):
            submit(store, parent=parent.id, key="k", digest=DIGEST)
            with pytest.raises(KeyReused):
                store.submit(
                    [new(parent=parent.id), new(key="k", digest=OTHER_DIGEST, parent=parent.id)]
                )

        counts = [submit(store, parent=parent.id).count for _ in range(CHILDREN_WITHOUT_A_CHECK)]

        assert counts == [0] * (CHILDREN_WITHOUT_A_CHECK - 1) + [-1]

    # ── All or none ──────────────────────────────────────────────────────────────────────────────

    @pytest.mark.parametrize("position", [0, 1, 2])
    def test_one_refused_document_refuses_all_of_its_call(
        self, store: Store, position: int
    ) -> None:
        submit(store, key="k", digest=DIGEST)
        before = snapshot(store)
        call = [new("acme"), new("bolt")]
        call.insert(position, new(key="k", digest=OTHER_DIGEST))

        with pytest.raises(KeyReused):
            store.submit(call)

        assert snapshot(store) == before
        assert submit(store, "acme").count == -1
        assert submit(store, "bolt").count == 0

    def test_a_retry_makes_no_check(self, store: Store) -> None:
        submit(store)
        fail(store, claim_one(store), retry_in_s=0)
        fail(store, claim_one(store))

        assert store.retry(ids(find_all(store))) == [State.DEAD]

        assert customer(store, "acme").count == 0
        assert submit(store).count == -1
