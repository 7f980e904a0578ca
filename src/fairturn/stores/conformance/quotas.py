"""The bytes of a customer's stored documents, and their limit."""

import pytest

from fairturn.clock import ManualClock
from fairturn.errors import QuotaExceeded
from fairturn.model import (
    DOCUMENT_BYTES,
    ENDED,
    Completed,
    CustomerSettings,
    NewDocument,
    Settings,
    State,
)
from fairturn.stores.conformance.steps import (
    adjust,
    assert_numbers_are_exact,
    claim_one,
    complete,
    customer,
    make,
    new,
    prune_all,
    snapshot,
    submit,
)
from fairturn.stores.conformance.suite import OpenStore, StoreSuite
from fairturn.stores.contract import QueueStore as Store

TWO = Settings(bytes_per_customer_max=2 * DOCUMENT_BYTES + 1_000)


def sized(size_bytes: int, name: str = "acme", **fields: object) -> NewDocument:
    return new(name, body="1" * size_bytes, size_bytes=size_bytes, **fields)


def stored_bytes(store: Store, name: str = "acme") -> int:
    return customer(store, name).stored_bytes


class QuotaPromises(StoreSuite):
    """`QuotaExceeded`: the submission is rejected and nothing changes."""

    def test_the_documents_of_a_customer_may_have_as_many_bytes_as_the_limit_says(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        store = open_store(clock=clock, settings=TWO)
        store.submit([sized(600)])
        before = snapshot(store)

        with pytest.raises(QuotaExceeded) as refused:
            store.submit([sized(401)])

        refusal = refused.value
        assert (refusal.customer, refusal.stored_bytes) == ("acme", DOCUMENT_BYTES + 600)
        assert refusal.bytes_max == TWO.bytes_per_customer_max
        assert snapshot(store) == before
        store.submit([sized(400)])
        assert stored_bytes(store) == TWO.bytes_per_customer_max
        with pytest.raises(QuotaExceeded):
            submit(store)
        store.submit([sized(1_000, "bolt")])

    def test_metadata_and_a_share_for_the_row_count_as_bytes(self, store: Store) -> None:
        store.submit([sized(5, metadata='{"a":1}'), sized(7), sized(0, "bolt")])

        assert stored_bytes(store) == 2 * DOCUMENT_BYTES + 5 + 7 + len('{"a":1}')
        assert stored_bytes(store, "bolt") == DOCUMENT_BYTES
        assert_numbers_are_exact(store)

    def test_a_content_outside_the_row_counts(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        store = open_store(clock=clock, settings=TWO)

        with pytest.raises(QuotaExceeded):
            store.submit([new(body=None, size_bytes=5_000_000_000, content_name="aa/1")])

        adjust(store, "acme", bytes_max=6_000_000_000)
        store.submit([new(body=None, size_bytes=5_000_000_000, content_name="aa/1")])
        assert stored_bytes(store) == DOCUMENT_BYTES + 5_000_000_000

    def test_a_call_that_would_pass_the_limit_stores_nothing_and_makes_no_check(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        store = open_store(clock=clock, settings=TWO)
        submit(store)
        before = snapshot(store)

        with pytest.raises(QuotaExceeded) as refused:
            store.submit([new("bolt"), new(), new()])

        assert refused.value.customer == "acme"
        assert snapshot(store) == before
        assert submit(store).count == -1
        assert submit(store, "bolt").count == 0

    def test_a_known_key_is_answered_even_over_the_limit(self, store: Store) -> None:
        first = submit(store, key="k", digest=b"d")
        submit(store)
        store.configure(Settings(bytes_per_customer_max=1))

        assert submit(store, key="k", digest=b"d") == first._replace(replayed=True)
        with pytest.raises(QuotaExceeded):
            store.submit([new(key="k", digest=b"d"), new()])
        assert stored_bytes(store) == customer(store, "acme").waiting * DOCUMENT_BYTES

    def test_a_limit_of_a_customer_replaces_that_of_the_queue(self, store: Store) -> None:
        adjust(store, "acme", bytes_max=DOCUMENT_BYTES + 10)
        store.submit([sized(10)])

        with pytest.raises(QuotaExceeded):
            store.submit([sized(0)])
        store.submit([sized(10, "bolt")] * 3)

        adjust(store, "acme")
        store.submit([sized(10)])
        store.configure(Settings(bytes_per_customer_max=DOCUMENT_BYTES))
        adjust(store, "acme", bytes_max=4 * DOCUMENT_BYTES)
        store.submit([sized(10)])
        assert customer(store, "acme").settings == CustomerSettings(bytes_max=4 * DOCUMENT_BYTES)

    @pytest.mark.parametrize("ended", ENDED)
    def test_a_document_counts_until_it_is_pruned(
        self, open_store: OpenStore, clock: ManualClock, ended: State
    ) -> None:
        store = open_store(clock=clock, settings=TWO)
        name = f"a-{ended}-one"
        make(store, ended, clock, size_bytes=1_500)

        with pytest.raises(QuotaExceeded):
            submit(store, name)
        clock.advance(365 * 86_400)
        prune_all(store)

        submit(store, name, size_bytes=1_500)
        assert stored_bytes(store, name) == DOCUMENT_BYTES + 1_500
        assert_numbers_are_exact(store)

    def test_pruned_documents_make_room_in_the_next_submission(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        """Also between two batches of prune."""
        store = open_store(clock=clock, settings=TWO)
        store.submit([new()] * 2)
        complete(store, [claim_one(store), claim_one(store)])
        clock.advance(365 * 86_400)

        store.prune(documents_max=1)

        assert stored_bytes(store) == DOCUMENT_BYTES
        submit(store)
        with pytest.raises(QuotaExceeded):
            submit(store)

    def test_a_purged_customer_begins_with_no_bytes(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        store = open_store(clock=clock, settings=TWO)
        store.submit([new()] * 2)

        store.purge("acme")

        store.submit([new()] * 2)
        assert_numbers_are_exact(store)

    def test_results_do_not_count(self, store: Store) -> None:
        submit(store)
        before = stored_bytes(store)

        store.finish([Completed(claim_one(store).fence, '"' + "r" * 10_000 + '"')])

        assert stored_bytes(store) == before

    def test_a_probe_changes_nothing_that_can_be_seen(self, store: Store) -> None:
        submit(store)
        before, version = snapshot(store), store.version()

        store.probe()
        store.probe()

        assert (snapshot(store), store.version()) == (before, version)
