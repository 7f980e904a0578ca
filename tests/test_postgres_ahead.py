"""What a claim on PostgreSQL reads before it is needed is true when it is used."""

import threading
from collections.abc import Iterator
from itertools import groupby

import psycopg
import pytest

from fairturn.clock import SECOND_US, ManualClock
from fairturn.errors import StoreUnavailable
from fairturn.flows import Mode
from fairturn.model import Claim, Completed, Released, Settings
from fairturn.stores.postgres import PostgresStore
from fairturn.testing.steps import claim, claim_each, ids, new, submit, submit_each
from tests.on_postgres import claims_held_up, wait_until_waiting
from tests.servers.queues import Databases

START = 1_700_000_000 * SECOND_US


@pytest.fixture
def url() -> Iterator[str]:
    with Databases() as databases:
        yield databases.new()


@pytest.fixture
def stores(url: str) -> Iterator[list[PostgresStore]]:
    """Two processes that have one queue open, as far as the database can tell."""
    opened = [PostgresStore(url, settings=Settings(mode=Mode.EQUAL)) for _ in range(2)]
    yield opened
    for store in opened:
        store.close()


def test_a_submission_that_a_document_overtook_which_became_due_is_claimed_in_its_order(
    url: str,
) -> None:
    clock = ManualClock(START)
    store = PostgresStore(url, settings=Settings(mode=Mode.EQUAL), clock=clock)
    first, second, third = submit_each(store, ["acme"] * 3)
    due = submit(store, due_at=clock.now() + 5 * SECOND_US)
    with psycopg.connect(url) as others:
        (slow,) = store.submit([new("acme")], connection=others)
        clock.advance(6)
        # The one that is due waits from now on, and is known to come after the third.
        assert ids([*claim(store), *claim(store)]) == [first.id, second.id]
        others.commit()

    assert ids(claim_each(store)) == [third.id, slow.id, due.id]
    store.close()


def test_a_submission_that_was_overtaken_before_anything_else_waited_is_claimed_in_its_order(
    url: str,
) -> None:
    clock = ManualClock(START)
    store = PostgresStore(url, settings=Settings(mode=Mode.EQUAL), clock=clock)
    due = submit(store, due_at=clock.now() + 5 * SECOND_US)
    with psycopg.connect(url) as others:
        (slow,) = store.submit([new("acme")], connection=others)
        clock.advance(6)
        submit(store, "another")  # who arrives after somebody else is read along with its arrival
        store.claim(0, worker="w", lease_us=SECOND_US)
        others.commit()
    last = submit(store)

    of_acme = [c for c in claim_each(store) if c.document.customer == "acme"]
    assert ids(of_acme) == [slow.id, due.id, last.id]
    store.close()


def test_documents_that_come_back_between_a_look_ahead_and_the_lock_come_first(
    url: str, stores: list[PostgresStore]
) -> None:
    one, other = stores
    one.submit([new(customer) for customer in "ab" * 200])
    returned = claim(other, 6)
    claim(one, 60)
    claimed: list[Claim] = []

    with claims_held_up(url) as looking:
        claiming = threading.Thread(target=lambda: claimed.extend(claim(one, 80)), daemon=True)
        claiming.start()
        wait_until_waiting(looking)
        other.finish([Released(c.fence) for c in returned])
        other.submit([new("a"), new("b")])
    claiming.join(30)

    assert set(ids(claimed[:6])) == set(ids(returned))
    by_customer = sorted(claimed, key=lambda c: c.document.customer)
    for _, line in groupby(by_customer, key=lambda c: c.document.customer):
        orders = [c.document.order or 0 for c in line]
        assert orders == sorted(orders)


@pytest.fixture
def strangers(stores: list[PostgresStore]) -> PostgresStore:
    """A process that has seen few of the customers, so that it reads the next ones ahead."""
    one, other = stores
    one.submit([new(f"customer {n}") for n in range(400)])
    one.claim(0, worker="w", lease_us=SECOND_US)
    for _ in range(3):
        claim(other, 20)
    return other


def test_settings_that_change_while_customers_are_read_ahead_are_heard_of(
    stores: list[PostgresStore], strangers: PostgresStore
) -> None:
    running = claim(strangers, 20)
    for attempts_max in range(6, 12):  # at one of these claims customers are read ahead
        stores[0].configure(Settings(mode=Mode.EQUAL, attempts_max=attempts_max))

        ended = [Completed(c.fence) for c in running]
        running, lost = strangers.claim(20, worker="w", lease_us=60 * SECOND_US, outcomes=ended)

        assert (len(running), lost) == (20, [])


def test_a_claim_that_the_server_ends_says_so_and_the_next_one_goes_on(
    url: str, strangers: PostgresStore
) -> None:
    said: list[str] = []

    def claim_in_vain() -> None:
        with pytest.raises(StoreUnavailable) as error:
            claim(strangers, 20)
        said.append(str(error.value))

    with claims_held_up(url) as looking:
        claiming = threading.Thread(target=claim_in_vain, daemon=True)
        claiming.start()
        (pid,) = wait_until_waiting(looking)
        looking.execute("SELECT pg_cancel_backend(%s)", (pid,))
        claiming.join(30)

    assert "canceling statement due to user request" in said[0]
    assert len(claim(strangers, 20)) == 20
