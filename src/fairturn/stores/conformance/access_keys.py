"""Access keys, workers, and the age of the oldest waiting document."""

import pytest

from fairturn.access.keys import AccessKey, Role
from fairturn.clock import SECOND_US, ManualClock
from fairturn.explain.snapshot import WorkerHeartbeat
from fairturn.model import Released
from fairturn.stores.conformance.steps import START, claim, claim_one, complete, submit
from fairturn.stores.conformance.suite import StoreSuite
from fairturn.stores.contract import QueueStore as Store

KEY = AccessKey("0123456789ab", Role.OPERATOR, None, "Ada's laptop", bytes(range(32)), START)


def key_of(customer: str, id: str) -> AccessKey:
    return KEY._replace(id=id, role=Role.CUSTOMER, customer=customer)


class AccessKeyPromises(StoreSuite):
    """`Store.add_key` and the other operations on access keys."""

    def test_a_key_is_given_back_as_it_was_kept(self, store: Store) -> None:
        of_customer = key_of("acme", "a" * 12)._replace(name="ж\u200b", ends_at_us=START + 1)
        for key in (KEY, of_customer):
            store.add_key(key)

        assert [store.access_key(KEY.id), store.access_key("a" * 12)] == [KEY, of_customer]
        assert store.access_key("f" * 12) is None

    def test_an_id_is_given_out_once(self, store: Store) -> None:
        store.add_key(KEY)

        with pytest.raises(ValueError, match="0123456789ab"):
            store.add_key(KEY._replace(name="another"))

        assert store.access_key(KEY.id) == KEY

    def test_keys_are_listed_by_id_in_pages_and_by_customer(self, store: Store) -> None:
        a, b, c = key_of("acme", "a" * 12), key_of("other", "b" * 12), key_of("acme", "c" * 12)
        for key in (c, KEY, b, a):
            store.add_key(key)

        assert store.access_keys() == [KEY, a, b, c]
        assert store.access_keys(after=KEY.id, size=2) == [a, b]
        assert store.access_keys(customer="acme") == [a, c]
        assert store.access_keys(customer="acme", after=a.id) == [c]
        assert store.access_keys(customer="nobody") == []

    def test_a_key_ends_at_the_earliest_moment_that_was_said(self, store: Store) -> None:
        store.add_key(KEY)

        assert store.end_key(KEY.id, START + 5) == KEY._replace(ends_at_us=START + 5)
        store.end_key(KEY.id, START + 9)
        assert store.access_key(KEY.id) == KEY._replace(ends_at_us=START + 5)
        store.end_key(KEY.id, START + 1)
        assert store.access_key(KEY.id) == KEY._replace(ends_at_us=START + 1)
        assert store.end_key("f" * 12, START) is None

    def test_the_last_use_never_goes_back(self, store: Store) -> None:
        store.add_key(KEY)

        store.note_use(KEY.id, START + 5)
        store.note_use(KEY.id, START + 2)
        store.note_use("f" * 12, START)  # a key that has been deleted

        assert store.access_key(KEY.id) == KEY._replace(used_at_us=START + 5)

    def test_a_purged_customer_takes_its_keys_along(self, store: Store) -> None:
        for key in (KEY, key_of("acme", "a" * 12), key_of("other", "b" * 12)):
            store.add_key(key)

        store.purge("acme")

        assert [key.id for key in store.access_keys()] == [KEY.id, "b" * 12]


class OverviewPromises(StoreSuite):
    """`Store.workers` and `Store.oldest_waiting`."""

    def test_workers_are_listed_by_name_with_their_slots(
        self, store: Store, clock: ManualClock
    ) -> None:
        store.sign_on("second", 3)
        clock.advance(20)
        store.sign_on("first", 2)

        assert store.workers() == [
            WorkerHeartbeat("first", START + 20 * SECOND_US, 2),
            WorkerHeartbeat("second", START, 3),
        ]

    def test_a_worker_that_signed_off_is_listed_no_more_until_it_signs_on_again(
        self, store: Store
    ) -> None:
        receipt = submit(store)
        store.sign_on("first", 1)
        store.sign_on("second", 1)

        store.sign_off("first")
        store.sign_off("never seen")

        assert [seen.worker for seen in store.workers()] == ["second"]
        found = store.snapshot(receipt.id)
        assert found is not None
        assert [seen.worker for seen in found.service.workers] == ["second"]
        store.sign_on("first", 1)
        assert [seen.worker for seen in store.workers()] == ["first", "second"]

    def test_the_oldest_waiting_document_is_known_by_level_before_any_claim(
        self, store: Store, clock: ManualClock
    ) -> None:
        assert store.oldest_waiting() == {}
        for customer in ("acme", "acme", "acme", "acme", "other"):
            submit(store, customer)
            clock.advance(1)

        assert store.oldest_waiting() == {1: START, 2: START + 3 * SECOND_US}

    def test_what_was_claimed_or_cancelled_does_not_wait(
        self, store: Store, clock: ManualClock
    ) -> None:
        submit(store)
        clock.advance(1)
        second = submit(store)
        clock.advance(1)
        submit(store)
        first = claim_one(store)

        assert store.oldest_waiting() == {1: START + SECOND_US}
        store.cancel([second.id])
        assert store.oldest_waiting() == {1: START + 2 * SECOND_US}
        store.finish([Released(first.fence)])
        assert store.oldest_waiting() == {1: START}
        complete(store, claim(store, 2))
        assert store.oldest_waiting() == {}

    def test_a_delayed_document_waits_from_when_it_is_due(
        self, store: Store, clock: ManualClock
    ) -> None:
        submit(store, due_at=START + 10 * SECOND_US)
        assert store.oldest_waiting() == {}

        clock.advance(20)
        claim(store, 0)

        assert store.oldest_waiting() == {1: START + 10 * SECOND_US}
