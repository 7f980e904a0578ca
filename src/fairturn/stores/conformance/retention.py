"""Deletion: old documents, in batches; all documents of a customer; unreferenced contents."""

from collections.abc import Mapping
from itertools import chain
from typing import Any

import pytest

from fairturn.clock import SECOND_US, ManualClock
from fairturn.model import (
    ENDED,
    KEPT_SETTINGS,
    Completed,
    ContentRef,
    CustomerSettings,
    Filter,
    Settings,
    State,
)
from fairturn.scheduling.flows import Mode
from fairturn.stores.conformance.steps import (
    LEASE_US,
    START,
    adjust,
    all_customers,
    assert_numbers_are_exact,
    claim,
    claim_one,
    complete,
    customers_of,
    fail,
    find_all,
    ids,
    make,
    new,
    prune_all,
    snapshot,
    submit,
    submit_each,
)
from fairturn.stores.conformance.suite import OpenStore, StoreSuite
from fairturn.stores.contract import QueueStore as Store


def kept_for(seconds: Mapping[State, float]) -> Settings:
    """Return settings that keep ended documents for these periods."""
    kept: dict[str, Any] = {KEPT_SETTINGS[state]: kept_s for state, kept_s in seconds.items()}
    return Settings(**kept)


KEPT_S = {state: 100 * n for n, state in enumerate(ENDED, 1)}
KEPT = kept_for(KEPT_S)
NOTHING_KEPT = kept_for(dict.fromkeys(ENDED, 0))


class PrunePromises(StoreSuite):
    """`Store.prune`."""

    @pytest.mark.parametrize("ended", ENDED)
    def test_each_ended_state_has_its_own_age(
        self, open_store: OpenStore, clock: ManualClock, ended: State
    ) -> None:
        store = open_store(clock=clock, settings=KEPT)
        made = {each: make(store, each, clock) for each in reversed(ENDED)}

        clock.advance(KEPT_S[ended])
        prune_all(store)
        assert store.read(made[ended]) is not None
        clock.advance(1 / SECOND_US)
        prune_all(store)
        assert store.read(made[ended]) is None

        kept = {each for each in ENDED if store.read(made[each])}
        assert kept == {each for each in ENDED if KEPT_S[each] > KEPT_S[ended]}

    def test_the_age_counts_from_the_end_and_not_from_the_submission(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        store = open_store(clock=clock, settings=KEPT)
        receipt = submit(store)
        clock.advance(1_000)
        complete(store, claim(store))
        clock.advance(50)

        prune_all(store)

        assert store.read(receipt.id) is not None

    @pytest.mark.parametrize("alive", [State.WAITING, State.DELAYED, State.RUNNING])
    def test_a_document_that_has_not_ended_is_never_forgotten(
        self, open_store: OpenStore, clock: ManualClock, alive: State
    ) -> None:
        store = open_store(clock=clock, settings=NOTHING_KEPT)
        id = make(store, alive)
        clock.advance(365 * 86_400)
        before = find_all(store)

        prune_all(store)

        assert ids(before) == [id]
        assert find_all(store) == before

    def test_contents_of_forgotten_documents_can_be_deleted(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        store = open_store(clock=clock, settings=KEPT)
        submit(store, "a", body=None, content_name="aa/document")
        submit(store, "b", body=None, content_name="bb/document")
        submit(store, "c")
        a, b, c = claim(store, 3)
        store.finish(
            [
                Completed(a.fence, content=ContentRef("aa/result", 1, b"")),
                Completed(c.fence, content=ContentRef("cc/result", 1, b"")),
            ]
        )
        fail(store, b)
        clock.advance(101)

        contents = prune_all(store)

        assert sorted(contents) == ["aa/document", "aa/result", "cc/result"]
        assert store.unreferenced(contents) == contents
        assert store.unreferenced(["bb/document"]) == []

    @pytest.mark.parametrize("documents_max", [1, 2, 5, 1_000])
    def test_a_batch_is_no_larger_than_asked_for_and_batches_come_to_an_end(
        self, open_store: OpenStore, clock: ManualClock, documents_max: int
    ) -> None:
        store = open_store(clock=clock, settings=NOTHING_KEPT)
        store.submit([new(f"c{n}", None, content_name=f"content {n}") for n in range(7)])
        complete(store, claim(store, 3))
        for claimed in claim(store, 2):
            fail(store, claimed)
        store.cancel(ids(find_all(store, Filter(states=(State.WAITING,)))))
        clock.advance(1)

        batches = []
        while (batch := store.prune(documents_max=documents_max)) is not None:
            batches.append(batch)
            assert len(batches) < 100, "pruning comes to no end"

        assert max(map(len, batches)) <= documents_max
        assert sorted(chain(*batches)) == [f"content {n}" for n in range(7)]
        assert find_all(store) == []

    def test_where_nothing_is_left_to_forget_the_answer_is_none(self, store: Store) -> None:
        assert store.prune() is None
        submit_each(store, "abcdefgh")
        before = snapshot(store)

        for documents_max in (1, 2, 3, 8, 1_000):
            assert prune_all(store, documents_max=documents_max) == []

        assert store.prune() is None
        assert snapshot(store) == before

    def test_an_idle_customer_without_settings_is_forgotten(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        store = open_store(clock=clock, settings=NOTHING_KEPT)
        submit_each(store, "abc")
        complete(store, claim(store, 3))
        assert claim(store) == []

        clock.advance(1_500)
        prune_all(store)
        assert [found.name for found in all_customers(store)] == ["a", "b", "c"]
        clock.advance(1 / SECOND_US)
        prune_all(store)
        assert all_customers(store) == []
        assert submit(store, "a").count == 0

    def test_many_idle_customers_are_forgotten_in_small_batches(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        store = open_store(clock=clock, settings=NOTHING_KEPT)
        store.submit([new(f"c{n}") for n in range(30)])
        complete(store, claim(store, 30))
        assert claim(store) == []
        submit(store, "busy")
        clock.advance(1_501)

        for documents_max in (4, 7):
            prune_all(store, documents_max=documents_max)

        assert [found.name for found in all_customers(store)] == ["busy"]

    def test_a_customer_is_remembered_while_its_count_is_not_0(
        self, open_store: OpenStore, clock: ManualClock
    ) -> None:
        store = open_store(clock=clock, settings=NOTHING_KEPT)
        store.submit([new()] * 3)
        complete(store, claim(store, 3))
        assert claim(store) == []
        clock.advance(1_499)

        prune_all(store)

        assert submit(store).count == -3

    @pytest.mark.parametrize(
        "settings",
        [
            CustomerSettings(weight=2),
            CustomerSettings(limit=1),
            CustomerSettings(paused=True),
            CustomerSettings(bytes_max=1),
        ],
    )
    def test_a_customer_with_settings_is_remembered(
        self, store: Store, clock: ManualClock, settings: CustomerSettings
    ) -> None:
        store.adjust("acme", settings)
        clock.advance(365 * 86_400)

        prune_all(store)

        assert [found.settings for found in all_customers(store)] == [settings]

    @pytest.mark.parametrize("any_state", list(State))
    def test_a_customer_with_documents_is_remembered(
        self, open_store: OpenStore, clock: ManualClock, any_state: State
    ) -> None:
        kept = kept_for(dict.fromkeys(ENDED, 10_000_000))
        store = open_store(clock=clock, settings=kept)
        id = make(store, any_state, clock)
        clock.advance(86_401)

        prune_all(store)

        assert [found.name for found in all_customers(store)] == [f"a-{any_state}-one"]
        assert ids(find_all(store)) == [id]

    @pytest.mark.parametrize("mode", list(Mode))
    def test_pruning_does_not_change_the_order(
        self, open_store: OpenStore, clock: ManualClock, mode: Mode
    ) -> None:
        settings = Settings(mode=mode, completed_kept_s=0, reset_interval_s=1)
        stores = [open_store(clock=clock, settings=settings) for _ in range(2)]

        orders = []
        for pruned, store in enumerate(stores):
            order = ""
            adjust(store, "a", weight=0.2)
            for names in ("abcab", "aacbd", "dddabc", "abcd"):
                submit_each(store, names)
                claims = claim(store, 3)
                order += customers_of(claims)
                complete(store, claims)
                clock.advance(2)
                if pruned:
                    prune_all(store, documents_max=2)
            orders.append(order + customers_of(claim(store, 100)))
            clock.set(START)

        assert orders[0] == orders[1]


class PurgePromises(StoreSuite):
    """`Store.purge` and `Store.unreferenced`."""

    def test_everything_of_a_customer_is_gone(self, store: Store, clock: ManualClock) -> None:
        adjust(store, "a", weight=3, limit=9)
        submit(store, "a", key="k", digest=b"1")
        submit_each(store, "aaaaaaa")
        submit(store, "a", due_at=START + SECOND_US)
        completed, dead, _ = claim(store, 3)
        complete(store, [completed])
        fail(store, dead)
        gone = ids(find_all(store))
        store.cancel(gone[1:2])

        assert store.purge("a") == []

        assert all_customers(store) == []
        assert find_all(store) == []
        assert [store.read(id) for id in gone] == [None] * len(gone)
        assert store.summary().waiting_by_priority == (0,) * 9
        assert_numbers_are_exact(store)
        clock.advance(60)
        assert claim(store) == []
        assert_numbers_are_exact(store)

    def test_attempts_under_way_lose_their_lease(self, store: Store) -> None:
        submit_each(store, "ab")
        a, b = claim(store, 2)

        store.purge("a")

        assert store.renew([a.fence, b.fence], lease_us=LEASE_US) == ([a.fence], [])
        assert store.finish([Completed(a.fence), Completed(b.fence)]) == [a.fence]
        assert find_all(store) != []

    def test_a_customer_of_the_same_name_starts_anew(self, store: Store) -> None:
        adjust(store, "a", paused=True, weight=0.5)
        store.submit([new("a", key="k", digest=b"1"), *[new("a")] * 5])

        store.purge("a")

        receipt = submit(store, "a", key="k", digest=b"2")
        assert receipt[2:] == (0, 1, START, False)
        assert [found.settings for found in all_customers(store)] == [CustomerSettings()]
        assert ids(claim(store, 9)) == [receipt.id]

    def test_a_customer_of_the_same_name_starts_anew_where_claims_have_seen_the_old_one(
        self, store: Store
    ) -> None:
        adjust(store, "a", limit=1)
        submit_each(store, "aab")
        assert customers_of(claim(store, 9)) == "ab"

        store.purge("a")

        submit_each(store, "aaa")
        assert customers_of(claim(store, 9)) == "aaa"
        assert_numbers_are_exact(store)

    def test_the_others_keep_everything(self, store: Store) -> None:
        submit_each(store, "bbbbb")
        alone = snapshot(store)
        adjust(store, "a", limit=2)
        submit_each(store, "aaaaa")

        store.purge("a")

        assert snapshot(store) == alone
        assert customers_of(claim(store, 9)) == "bbbbb"

    def test_contents_of_a_purged_customer_can_be_deleted(self, store: Store) -> None:
        submit(store, "a", body=None, content_name="aa/waiting", due_at=START + 1)
        submit(store, "a", body=None, content_name="aa/completed")
        submit(store, "b", body=None, content_name="bb/document")
        a = claim_one(store)
        store.finish([Completed(a.fence, content=ContentRef("aa/result", 1, b""))])

        contents = store.purge("a")

        assert sorted(contents) == ["aa/completed", "aa/result", "aa/waiting"]
        assert store.unreferenced([*contents, "bb/document"]) == contents

    def test_a_customer_that_does_not_exist_is_purged_without_a_word(self, store: Store) -> None:
        submit(store, "a")
        before = snapshot(store)

        assert store.purge("nobody") == []

        assert snapshot(store) == before

    def test_a_purge_makes_room(self, open_store: OpenStore, clock: ManualClock) -> None:
        store = open_store(clock=clock, settings=Settings(waiting_max=3))
        submit_each(store, "aa")
        submit(store, "a", due_at=START + 1)

        store.purge("a")

        assert len(submit_each(store, "bbb")) == 3

    def test_contents_that_belong_to_no_document_are_named_in_the_order_given(
        self, store: Store
    ) -> None:
        submit(store, body=None, content_name="of a document")
        submit(store)
        store.finish(
            [
                Completed(claimed.fence, content=ContentRef(f"of result {n}", 1, b""))
                for n, claimed in enumerate(claim(store, 2))
            ]
        )

        names = ["z", "of a document", "\U0001f4c4", "of result 1", "a", "of result 0", ""]

        assert store.unreferenced(names) == ["z", "\U0001f4c4", "a", ""]
        assert store.unreferenced(names, timeout_s=30) == ["z", "\U0001f4c4", "a", ""]
        assert store.unreferenced([]) == []
