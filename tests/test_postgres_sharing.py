"""Claims on PostgreSQL that wait for each other: the one that has the lock serves the others."""

import threading
from collections.abc import Iterator

import psycopg
import pytest

from fairturn.errors import StoreUnavailable
from fairturn.model import Claim, Completed, CustomerSettings, Fence, Outcome, State
from fairturn.stores.postgres import PostgresStore
from fairturn.testing.steps import (
    LEASE_US,
    assert_numbers_are_exact,
    claim,
    customers_of,
    find_all,
    submit_each,
)
from tests.on_postgres import claims_held_up, wait_until_waiting
from tests.servers.queues import Databases
from tests.waiting import wait_until


@pytest.fixture
def url() -> Iterator[str]:
    with Databases() as databases:
        yield databases.new()


class Claimer:
    """A process that claims, as far as the database can tell."""

    def __init__(self, url: str, name: str) -> None:
        self.store = PostgresStore(url)
        self._name = name
        self._thread: threading.Thread | None = None
        self.claims: list[Claim] = []
        self.lost: list[Fence] = []

    def begin(self, n: int, outcomes: tuple[Outcome, ...]) -> None:
        def run() -> None:
            self.claims, self.lost = self.store.claim(
                n, worker=self._name, lease_us=LEASE_US, outcomes=outcomes
            )

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def end(self) -> list[Claim]:
        assert self._thread is not None
        self._thread.join(30)
        assert not self._thread.is_alive(), f"the claim of {self._name} does not end"
        return self.claims


class Contest:
    """Claimers that wait for the lock in a known order, because somebody holds it meanwhile."""

    def __init__(self, url: str, names: str) -> None:
        self._url = url
        self.claimers = {name: Claimer(url, name) for name in names}
        self.together(names, 0)  # who has waited once says what it wants the next time

    def together(
        self, names: str, n: int = 1, outcomes: tuple[Outcome, ...] = ()
    ) -> dict[str, list[Claim]]:
        """What each gets, if all begin before the first of them may go on."""
        with claims_held_up(self._url) as looking:
            for place, name in enumerate(names, start=1):
                self.claimers[name].begin(n, outcomes)
                wait_until_waiting(looking, place)
        return {name: self.claimers[name].end() for name in names}

    def versions(self) -> int:
        """How many claims have written to the queue."""
        with psycopg.connect(self._url) as connection:
            ((version,),) = connection.execute("SELECT max(version) FROM fairturn.turns")
            return int(version)

    def wishes(self) -> int:
        with psycopg.connect(self._url) as connection:
            ((left,),) = connection.execute("SELECT count(*) FROM fairturn.wanted")
            return int(left)


@pytest.fixture
def contest(url: str) -> Iterator[Contest]:
    made = Contest(url, "ABC")
    yield made
    for claimer in made.claimers.values():
        claimer.store.close()


def test_who_has_the_lock_claims_for_all_who_wait_in_the_order_of_service(contest: Contest) -> None:
    store = contest.claimers["A"].store
    submit_each(store, "aabbcc")
    before = contest.versions()

    got = contest.together("BCA")

    assert [customers_of(got[name]) for name in "BCA"] == ["a", "b", "c"]
    assert contest.versions() == before + 1
    assert contest.wishes() == 0
    assert_numbers_are_exact(store)


def test_each_that_was_served_has_a_fence_and_a_lease_of_its_own(contest: Contest) -> None:
    store = contest.claimers["A"].store
    submit_each(store, "abc")

    got = contest.together("ABC")

    (first,), (second,), (third,) = got.values()
    assert first.fence.number < second.fence.number < third.fence.number
    running = {found.id: found for found in find_all(store)}
    for name, (given,) in got.items():
        assert running[given.document.id] == given.document
        assert (given.document.worker, given.document.attempts) == (name, 1)
        assert given.document.claimed_at is not None
        assert given.lease_ends_at == given.document.claimed_at + LEASE_US
        assert contest.claimers[name].store.finish([Completed(given.fence)]) == []
    assert store.summary().completed == 3
    assert_numbers_are_exact(store)


def test_where_there_is_less_than_all_want_the_last_ones_get_nothing(contest: Contest) -> None:
    store = contest.claimers["A"].store
    submit_each(store, "abc")

    got = contest.together("ABC", 2)

    assert [len(got[name]) for name in "ABC"] == [2, 1, 0]
    assert contest.wishes() == 0
    assert_numbers_are_exact(store)


def test_a_limit_holds_over_all_who_are_served_together(contest: Contest) -> None:
    store = contest.claimers["A"].store
    store.adjust("a", CustomerSettings(limit=1))
    submit_each(store, "aaab")

    got = contest.together("ABC")

    assert sorted(customers_of(got["A"]) + customers_of(got["B"]) + customers_of(got["C"])) == [
        *"ab"
    ]
    assert_numbers_are_exact(store)


def test_outcomes_that_come_with_a_shared_claim_are_recorded_once(contest: Contest) -> None:
    store = contest.claimers["A"].store
    submit_each(store, "aabb")
    done = claim(store)[0]

    contest.together("BCA", outcomes=(Completed(done.fence),))

    lost = [contest.claimers[name].lost for name in "ABC"]
    assert sorted(lost) == [[], [done.fence], [done.fence]]
    assert store.summary().completed == 1
    assert_numbers_are_exact(store)


def test_a_wish_whose_owner_is_gone_is_left_alone_and_forgotten_in_time(
    url: str, contest: Contest
) -> None:
    store = contest.claimers["A"].store
    submit_each(store, "ab")
    with psycopg.connect(url) as connection:
        connection.execute(
            "INSERT INTO fairturn.wanted (number, n, worker, lease_us) VALUES (1, 1, 'gone', 1)"
        )

    got = contest.together("AB")

    assert [len(got[name]) for name in "AB"] == [1, 1]
    assert {found.worker for found in find_all(store)} == {"A", "B"}
    assert contest.wishes() == 1

    def is_forgotten() -> bool:  # when nothing is under way that began before it, anywhere
        store.prune()
        return contest.wishes() == 0

    wait_until(is_forgotten, "the wish is forgotten")


def test_who_finds_the_lock_free_again_claims_alone(contest: Contest) -> None:
    store = contest.claimers["A"].store
    submit_each(store, "abcd")
    contest.together("AB")

    claim(store)
    claim(store)

    assert store.summary().running == 4
    assert contest.wishes() == 0


def test_what_was_recorded_stays_recorded_if_the_server_is_lost_before_the_claim(
    contest: Contest, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = contest.claimers["A"].store
    submit_each(store, "ab")
    done = claim(store)[0]
    contest.together("A", 0)
    real = store.claim

    def lost(n: int, **options: object) -> object:
        if "outcomes" in options:
            return real(n, **options)  # type: ignore[arg-type]
        raise StoreUnavailable("the server is away")

    monkeypatch.setattr(store, "claim", lost)

    claimed = real(1, worker="A", lease_us=LEASE_US, outcomes=[Completed(done.fence)])

    assert claimed == ([], [])
    assert {found.state for found in find_all(store)} == {State.COMPLETED, State.WAITING}
