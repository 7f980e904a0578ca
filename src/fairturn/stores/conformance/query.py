"""Queries: documents by filter and page, one document, customers, and the summary."""

from itertools import pairwise
from typing import Any

import pytest

from fairturn.clock import SECOND_US, ManualClock
from fairturn.model import (
    ENDED,
    Completed,
    CustomerSettings,
    Failed,
    Filter,
    Released,
    Settings,
    State,
)
from fairturn.scheduling.flows import Mode
from fairturn.stores.conformance.steps import (
    LEASE_S,
    START,
    adjust,
    all_customers,
    assert_numbers_are_exact,
    claim,
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
    submit_each,
)
from fairturn.stores.conformance.suite import StoreSuite
from fairturn.stores.contract import QueueStore as Store


class QueryPromises(StoreSuite):
    """`Store.find` and `Store.read`."""

    def test_documents_come_with_the_newest_submission_first(
        self, store: Store, clock: ManualClock
    ) -> None:
        receipts = submit_each(store, "aba", due_at=START + SECOND_US)
        receipts += store.submit([new("c"), new("a")])
        clock.advance(1)
        complete(store, claim(store, 3))

        found = store.find(Filter())

        assert ids(found.documents) == ids(receipts)[::-1]
        assert found.next is None

    def test_what_is_found_is_what_is_read(self, store: Store, clock: ManualClock) -> None:
        for wanted in (State.RUNNING, *ENDED):
            make(store, wanted, clock)
        make(store, State.WAITING)
        make(store, State.DELAYED)

        for found in find_all(store):
            assert found == document(store, found.id)

    @pytest.mark.parametrize("customer", [None, "b"])
    def test_a_look_with_a_reach_goes_on_where_it_ended(
        self, store: Store, customer: str | None
    ) -> None:
        submit_each(store, "abbbaaabaaaa")
        complete(store, claim(store, 3))
        filter = Filter(customer=customer, priorities=(1,))

        whole = ids(find_all(store, filter))
        found, after, looks = [], None, 0
        while True:
            page = store.find(filter, after=after, size=2, reach=3)
            found += ids(page.documents)
            after, looks = page.next, looks + 1
            if after is None:
                break

        assert found == whole
        assert looks >= 4

    def test_a_reach_ends_a_look_before_what_is_further_away(self, store: Store) -> None:
        wanted = submit(store, "first", name="wanted")
        submit_each(store, "aaaaaaaa")

        near = store.find(Filter(name="wanted"), reach=8)
        further = store.find(Filter(name="wanted"), after=near.next, reach=8)

        assert (near.documents, near.next is None) == ([], False)
        assert (ids(further.documents), further.next) == ([wanted.id], None)

    @pytest.mark.parametrize(
        ("part", "found"),
        [
            ("invoice", ["Invoice-17.pdf", "my_INVOICE%.pdf"]),
            ("-17.P", ["Invoice-17.pdf"]),
            ("%", ["my_INVOICE%.pdf"]),
            ("y_i", ["my_INVOICE%.pdf"]),
            ("\\", ["a\\b"]),
            ("übung", ["ÜBUNG 2"]),
            ("nothing", []),
        ],
    )
    def test_documents_are_found_by_a_part_of_their_name_as_it_is_written_or_in_other_case(
        self, store: Store, part: str, found: list[str]
    ) -> None:
        names = ["ÜBUNG 2", "a\\b", "my_INVOICE%.pdf", "Invoice-17.pdf"]
        for name in names:
            submit(store, name=name)
        submit(store, "another")

        page = store.find(Filter(customer="acme", name_part=part))
        everybody = store.find(Filter(name_part=part))

        assert [document.name for document in page.documents] == found
        assert everybody == page

    def test_documents_are_found_by_all_of_their_tags(self, store: Store) -> None:
        tagged = {
            name: store.submit([new("a", tags=tags)])[0].id
            for name, tags in {
                "both": '["late","scan"]',
                "one": '["scan"]',
                "other": '["sc","scanned"]',
                "none": None,
            }.items()
        }

        def found(*tags: str) -> set[str]:
            return set(ids(store.find(Filter(tags=tags)).documents))

        assert found("scan") == {tagged["both"], tagged["one"]}
        assert found("late", "scan") == {tagged["both"]}
        assert found("Scan") == set()
        document = store.find(Filter(ids=(tagged["both"],))).documents[0]
        assert document.tags == ("late", "scan")
        claimed = [each.document for each in claim(store, 4)]
        assert {each.id: each.tags for each in claimed} == {
            tagged["both"]: ("late", "scan"),
            tagged["one"]: ("scan",),
            tagged["other"]: ("sc", "scanned"),
            tagged["none"]: (),
        }

    @pytest.mark.parametrize("wanted", list(State))
    def test_documents_are_found_by_state(
        self, store: Store, clock: ManualClock, wanted: State
    ) -> None:
        order = [s for s in State if s is not State.WAITING] + [State.WAITING]
        made = {each: make(store, each, clock) for each in order}

        found = store.find(Filter(states=(wanted,)))

        assert ids(found.documents) == [made[wanted]]
        assert found.documents[0].state is wanted

    def test_documents_are_found_by_several_states(self, store: Store) -> None:
        dead, running = make(store, State.DEAD), make(store, State.RUNNING)
        waiting = make(store, State.WAITING)

        found = store.find(Filter(states=(State.WAITING, State.DEAD)))

        assert ids(found.documents) == [waiting, dead]
        assert running not in ids(found.documents)

    def test_documents_of_one_state_come_with_the_newest_first_whatever_happened_when(
        self, store: Store, clock: ManualClock
    ) -> None:
        receipts = submit_each(store, "abcabc")
        clock.advance(1)
        claims = claim(store, 6)
        for claimed in (claims[4], claims[0], claims[2]):
            clock.advance(1)
            fail(store, claimed)
        for claimed, lease_s in ((claims[1], 9), (claims[3], 5), (claims[5], 7)):
            store.renew([claimed.fence], lease_us=lease_s * SECOND_US)
        due = [submit(store, due_at=START + in_s * SECOND_US).id for in_s in (90, 50, 70)]

        dead = {claims[n].document.id for n in (4, 0, 2)}
        newest_first = ids(receipts)[::-1]
        for wanted, expected in [
            (State.DEAD, [id for id in newest_first if id in dead]),
            (State.RUNNING, [id for id in newest_first if id not in dead]),
            (State.DELAYED, due[::-1]),
        ]:
            assert ids(find_all(store, Filter(states=(wanted,)), size=2)) == expected

    @pytest.mark.parametrize(
        "filter, expected",
        [
            (Filter(customer="a"), [7, 6, 2, 1, 0]),
            (Filter(customer="nobody"), []),
            (Filter(priorities=(1,)), [9, 8, 5, 4, 3, 2, 1, 0]),
            (Filter(priorities=(2, 3)), [7, 6]),
            (Filter(priorities=()), []),
            (Filter(states=()), []),
            (Filter(name="x.pdf"), [9, 8]),
            (Filter(name="x"), []),
            (Filter(submitted_from=START + SECOND_US), [9, 8, 7, 6]),
            (Filter(submitted_before=START + SECOND_US), [5, 4, 3, 2, 1, 0]),
            (Filter(submitted_from=START + 1, submitted_before=START + SECOND_US), []),
            (Filter(customer="a", priorities=(2,)), [7, 6]),
            (Filter(customer="b", states=(State.WAITING,)), [9, 8, 5, 4, 3]),
            (Filter(customer="b", name="x.pdf", submitted_from=START), [9, 8]),
        ],
    )
    def test_documents_are_found_by_each_filter_and_by_all_of_several(
        self, store: Store, clock: ManualClock, filter: Filter, expected: list[int]
    ) -> None:
        receipts = store.submit([new("a")] * 3 + [new("b")] * 3)
        clock.advance(1)
        receipts += store.submit([new("a")] * 2)
        receipts += store.submit([new("b", name="x.pdf", parent=receipts[3].id)] * 2)

        found = store.find(filter)

        assert ids(found.documents) == [receipts[n].id for n in expected]

    def test_documents_are_found_by_id(self, store: Store) -> None:
        receipts = submit_each(store, "abab")
        wanted = (receipts[2].id, receipts[0].id, "unknown", "", "f" * 15, receipts[0].id)

        found = store.find(Filter(ids=wanted))

        assert ids(found.documents) == [receipts[2].id, receipts[0].id]
        assert store.find(Filter(ids=())).documents == []
        both = store.find(Filter(ids=wanted, customer="b")).documents
        assert both == []

    @pytest.mark.parametrize("size", [1, 2, 3, 8, 9, 10])
    @pytest.mark.parametrize(
        "filter",
        [
            Filter(),
            Filter(customer="a"),
            Filter(states=(State.WAITING,)),
            Filter(customer="a", states=(State.WAITING, State.RUNNING)),
        ],
    )
    def test_pages_together_are_the_whole_list(
        self, store: Store, size: int, filter: Filter
    ) -> None:
        store.submit([new("ab"[n % 2]) for n in range(18)])
        whole = store.find(filter, size=100)

        pages = find_all(store, filter, size=size)

        assert whole.next is None
        assert pages == whole.documents
        assert len(pages) == (9 if filter.customer else 18)

    def test_a_page_that_is_just_full_is_the_last(self, store: Store) -> None:
        store.submit([new()] * 4)

        first = store.find(Filter(), size=2)
        second = store.find(Filter(), size=2, after=first.next)

        assert first.next is not None
        assert (len(second.documents), second.next) == (2, None)

    def test_no_document_is_shown_twice_or_left_out_while_others_come_and_change(
        self, store: Store
    ) -> None:
        receipts = store.submit([new(f"customer {n % 4}") for n in range(25)])

        seen: list[str] = []
        after: str | None = None
        while True:
            page = store.find(Filter(), after=after, size=4)
            seen += ids(page.documents)
            after = page.next
            if after is None:
                break
            store.submit([new("customer 1"), new("another")])
            claim(store, 2)

        assert seen == ids(receipts)[::-1]

    @pytest.mark.parametrize("id", ["", "no such document", "0" * 15, "f" * 15, "\x00", "F" * 15])
    def test_a_document_that_does_not_exist_is_not_read(self, store: Store, id: str) -> None:
        submit(store)

        assert store.read(id) is None

    def test_ids_tell_nothing_about_how_many_documents_there_are(self, store: Store) -> None:
        receipts = store.submit([new()] * 100)

        numbers = [int(receipt.id, 16) for receipt in receipts]

        assert sorted(numbers) != numbers
        assert len({b - a for a, b in pairwise(numbers)}) > 90


class CustomerPromises(StoreSuite):
    """`Store.customers` and the settings of `Store.adjust`."""

    def test_a_customer_is_shown_with_its_numbers(self, store: Store, clock: ManualClock) -> None:
        store.submit([new()] * 6)
        submit(store, due_at=START + 60 * SECOND_US)
        claim(store, 2)
        clock.advance(1)

        found = customer(store, "acme")

        assert (found.name, found.settings) == ("acme", CustomerSettings())
        assert (found.count, found.count_updated_at_us) == (-6, START)
        assert (found.waiting, found.running, found.delayed) == (4, 2, 1)
        assert found.waiting_by_priority == (1, 2, 1, 0, 0, 0, 0, 0, 0)

    def test_a_count_is_shown_as_0_after_more_than_the_interval(
        self, store: Store, clock: ManualClock
    ) -> None:
        store.submit([new()] * 3)

        clock.advance(1_500)
        assert customer(store, "acme").count == -2
        clock.advance(1 / SECOND_US)
        assert customer(store, "acme").count == 0
        assert customer(store, "acme").count_updated_at_us == START

    @pytest.mark.parametrize(
        "settings",
        [
            {"weight": 2.5},
            {"weight": 0.01},
            {"weight": 100.0},
            {"weight": 1.001},
            {"limit": 1},
            {"limit": 10_000},
            {"paused": True},
            {"weight": 0.5, "limit": 3, "paused": True},
            {"bytes_max": 3_000_000_000},
            {},
        ],
    )
    def test_settings_are_shown_as_they_were_put_in_force(
        self, store: Store, settings: dict[str, Any]
    ) -> None:
        submit(store, "bolt")
        adjust(store, "acme", weight=7, limit=7, paused=True)

        adjust(store, "acme", **settings)

        assert customer(store, "acme").settings == CustomerSettings(**settings)
        assert customer(store, "bolt").settings == CustomerSettings()

    def test_a_name_that_is_new_becomes_known_by_its_settings(self, store: Store) -> None:
        adjust(store, "acme", limit=2)

        found = customer(store, "acme")
        assert (found.count, found.count_updated_at_us) == (0, None)
        assert (found.waiting, found.running, found.delayed) == (0, 0, 0)
        assert submit(store).count == 0
        assert customer(store, "acme").settings == CustomerSettings(limit=2)

    def test_settings_leave_the_count_alone(self, store: Store) -> None:
        store.submit([new()] * 3)

        adjust(store, "acme", weight=2)

        assert customer(store, "acme").count == -2
        assert submit(store).count == -3

    @pytest.mark.parametrize("size", [1, 2, 3, 7, 8])
    def test_customers_come_by_name_page_after_page(self, store: Store, size: int) -> None:
        names = ["b", "a", "B", "\u00e4", "\U0001f4c4", "aa", "\uffff"]
        submit_each(store, names)

        assert [found.name for found in all_customers(store, size=size)] == sorted(names)
        page = store.customers(size=size)
        assert page.next == (sorted(names)[size - 1] if size < len(names) else None)

    def test_customers_are_found_by_name(self, store: Store) -> None:
        submit_each(store, ["a", "b", "c", "d"])
        names = ["d", "nobody", "b", "d", "a"]

        assert [c.name for c in store.customers(names=names).customers] == ["a", "b", "d"]
        assert store.customers(names=[]).customers == []
        first = store.customers(names=names, size=2)
        assert ([c.name for c in first.customers], first.next) == (["a", "b"], "b")
        rest = store.customers(names=names, size=2, after=first.next)
        assert ([c.name for c in rest.customers], rest.next) == (["d"], None)

    def test_no_customer_is_shown_twice_or_left_out_while_others_come(self, store: Store) -> None:
        names = [f"customer {n:02}" for n in range(20)]
        submit_each(store, names)

        seen: list[str] = []
        after: str | None = None
        while True:
            page = store.customers(after=after, size=3)
            seen += [found.name for found in page.customers]
            after = page.next
            if after is None:
                break
            submit_each(store, [f"another {len(seen)}", f"customer {len(seen):02}, too"])

        assert [name for name in seen if name in names] == names
        assert len(seen) == len(set(seen))


class SummaryPromises(StoreSuite):
    """`Store.summary`."""

    def test_an_empty_queue_has_no_numbers(self, store: Store) -> None:
        summary = store.summary()

        assert summary.waiting_by_priority == (0,) * 9
        assert (summary.waiting, summary.delayed, summary.running) == (0, 0, 0)

    def test_each_attempt_that_was_begun_is_counted_for_ever(
        self, store: Store, clock: ManualClock
    ) -> None:
        submit_each(store, "aab")
        first, second, _ = claim(store, 3)
        complete(store, [first])
        fail(store, second, retry_in_s=1)
        clock.advance(2)
        claim_one(store)
        store.configure(Settings(mode=Mode.EQUAL))
        store.purge("a")

        assert store.summary().started == 4

    def test_each_way_in_which_documents_end_is_counted(self, store: Store) -> None:
        receipts = submit_each(store, "abcdef")
        submit(store, "g", due_at=START + SECOND_US)
        first, second, third, fourth, *_ = claim(store, 4)
        complete(store, [first, second])
        fail(store, third)
        store.cancel(ids([fourth]))
        assert _ended(store) == (2, 1, 0), "one that runs is cancelled when it has stopped"
        store.finish([Released(fourth.fence)])
        store.cancel(ids(receipts[4:]))
        store.cancel(ids(find_all(store, Filter(states=(State.DELAYED,)))))
        store.cancel(ids(receipts))

        assert _ended(store) == (2, 1, 4)
        assert store.summary().retried == 0

    def test_an_outcome_that_came_too_late_is_not_counted(
        self, store: Store, clock: ManualClock
    ) -> None:
        submit(store, "a")
        late = claim_one(store)
        clock.advance(LEASE_S)
        in_time = claim_one(store)
        store.finish([Failed(late.fence, "too late", None), Completed(late.fence)])
        complete(store, [in_time])
        store.finish([Completed(in_time.fence), Failed(in_time.fence, "too late", None)])

        assert _ended(store) == (1, 0, 0)

    def test_attempts_that_are_followed_by_another_are_counted(
        self, store: Store, clock: ManualClock
    ) -> None:
        store.configure(Settings(attempts_max=3))
        submit(store, "a")
        store.finish([Released(claim_one(store).fence)])
        assert store.summary().retried == 0, "what was given back did not fail"

        fail(store, claim_one(store), retry_in_s=0)
        assert store.summary().retried == 1
        claim_one(store)
        clock.advance(LEASE_S)
        last = claim_one(store)
        assert store.summary().retried == 2, "a lease expired"
        fail(store, last, retry_in_s=0)

        assert store.summary().retried == 2
        assert _ended(store) == (0, 1, 0)

    def test_a_document_that_dies_twice_is_counted_twice(
        self, store: Store, clock: ManualClock
    ) -> None:
        store.configure(Settings(attempts_max=1))
        dead = submit(store, "a").id
        fail(store, claim_one(store))
        store.retry([dead])
        claim_one(store)
        clock.advance(LEASE_S)
        assert claim(store) == []

        assert _ended(store) == (0, 2, 0)

    def test_what_is_forgotten_stays_counted(self, store: Store, clock: ManualClock) -> None:
        submit_each(store, "abcde")
        first, second, third, _ = claim(store, 4)
        complete(store, [first])
        fail(store, second)
        store.cancel(ids([third]))
        store.finish([Released(third.fence)])
        store.configure(Settings(mode=Mode.EQUAL))
        store.purge("d")  # its document is running
        store.purge("e")  # its document is waiting
        assert _ended(store) == (1, 1, 1)

        clock.advance(365 * 86_400)
        prune_all(store)

        assert find_all(store) == []
        assert _ended(store) == (1, 1, 1)

    def test_numbers_are_exact_at_every_step_of_the_road(
        self, store: Store, clock: ManualClock
    ) -> None:
        assert_numbers_are_exact(store)
        receipts = store.submit([new("a")] * 25 + [new("b")] * 4)
        assert store.summary().waiting_by_priority == (6, 3, 2, 2, 2, 2, 2, 6, 4)
        assert_numbers_are_exact(store)
        submit_each(store, "ccc", due_at=START + SECOND_US)
        assert_numbers_are_exact(store)
        running = claim(store, 8)
        assert_numbers_are_exact(store)
        store.finish([Completed(claimed.fence) for claimed in running[:2]])
        assert_numbers_are_exact(store)
        fail(store, running[2])
        fail(store, running[3], retry_in_s=2)
        assert_numbers_are_exact(store)
        store.cancel(ids([*receipts[-2:], running[4]]))
        assert_numbers_are_exact(store)
        store.retry(ids(running))
        assert_numbers_are_exact(store)
        adjust(store, "a", limit=1)
        clock.advance(LEASE_S)
        claim_one(store)
        assert_numbers_are_exact(store)
        claim(store, 100)
        assert_numbers_are_exact(store)
        store.purge("b")
        assert_numbers_are_exact(store)
        clock.advance(30 * 86_400)
        store.prune()
        assert_numbers_are_exact(store)
        claim(store, 100)
        assert_numbers_are_exact(store)

    def test_reading_changes_nothing(self, store: Store) -> None:
        for wanted in (State.RUNNING, State.DEAD, State.DELAYED, State.WAITING):
            make(store, wanted)
        before = snapshot(store)
        version = store.version()

        store.find(Filter(customer="acme"))
        store.customers()
        store.summary()
        store.settings()
        store.unreferenced(["x"])

        assert snapshot(store) == before
        assert store.version() == version


def _ended(store: Store) -> tuple[int, int, int]:
    """Return how many documents were ever completed, dead and cancelled."""
    summary = store.summary()
    return summary.completed, summary.dead, summary.cancelled
