"""PostgreSQL: outages and expiries while several transactions run at once, and the rules in SQL."""

from collections.abc import Iterator
from contextlib import closing
from random import Random
from typing import Any

import psycopg
import pytest
from psycopg.types.composite import CompositeInfo

from fairturn.clock import SECOND_US, ManualClock
from fairturn.model import (
    Claim,
    Completed,
    Failed,
    KindSettings,
    OutageReport,
    Outcome,
    Released,
    State,
)
from fairturn.scheduling import outages
from fairturn.scheduling.outages import Report, ServiceState
from fairturn.stores.conformance.steps import (
    assert_numbers_are_exact,
    claim,
    ids,
    state,
    submit,
    submit_each,
    with_kinds,
)
from fairturn.stores.postgres import PostgresStore
from tests.attempt import Attempt
from tests.on_postgres import PATIENCE_S, wait_until_waiting

START = 1_700_000_000 * SECOND_US
SEED = 35
SERVICE = "ocr-service"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START)


@pytest.fixture
def store(url: str, clock: ManualClock) -> Iterator[PostgresStore]:
    with closing(PostgresStore(url, clock=clock)) as opened:
        with_kinds(opened)
        yield opened


@pytest.fixture
def other(store: PostgresStore, url: str, clock: ManualClock) -> Iterator[PostgresStore]:
    with closing(PostgresStore(url, clock=clock)) as opened:
        yield opened


@pytest.fixture
def looking(url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(url, autocommit=True) as connection:
        yield connection


def report(claimed: Claim) -> OutageReport:
    return OutageReport(claimed.fence, "no answer", 4 * SECOND_US)


# ── The rules in SQL ─────────────────────────────────────────────────────────────────────────────

Row = tuple[Any, ...]


def random_state(random: Random, now: int) -> ServiceState | None:
    """Return any state, also one that no history leads to."""
    if random.random() < 0.1:
        return None

    def near() -> int:
        spread = random.choice([1, 1_000, 500_000, 5_000_000, 60_000_000, 10**12])
        return now + random.randint(-2 * spread, spread) // random.choice([1, 2])

    held = random.random() < 0.5
    return ServiceState(
        began_at=near(),
        reported_at=random.choice([near(), now - outages.REPORTS_WITHIN_US, now]),
        document=random.choice([None, 1, 2]),
        error="before",
        first_interval_us=random.randint(1_000_000, 90_000_000),
        interval_us=random.randint(1_000_000, 90_000_000),
        fence=random.randint(1, 6),
        held=held,
        probes=random.choice([0, 1, outages.PROBES_FREE - 1, outages.PROBES_FREE]),
        probe_at=near(),
        probe_set_at=near(),
        resumed_at=None if held else random.choice([None, near(), now - outages.RESUME_US]),
    )


class SqlRules:
    """The functions of `functions/outage.sql`, with the values of `scheduling/outages.py`."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection
        info = CompositeInfo.fetch(connection, "fairturn.outages")
        assert info is not None
        assert info.field_names == ("service", *ServiceState._fields)

    def call(self, expression: str, state: ServiceState | None, *values: Any) -> Row:
        """Return the columns of a function whose first argument is a state."""
        row = None if state is None else f"ROW({', '.join(['%s'] * 13)})::fairturn.outages"
        own = () if state is None else (SERVICE, *state)
        statement = expression.replace("STATE", row or "NULL::fairturn.outages")
        (found,) = self._connection.execute(statement, (*own, *values)).fetchall()
        return tuple(found)

    def state(self, function: str, state: ServiceState, *values: Any) -> ServiceState | None:
        """Return the state that a function returns."""
        marks = "".join(", %s::int8" for _ in values)
        found = self.call(f"SELECT (fairturn.{function}(STATE{marks})).*", state, *values)
        return to_state(found)

    def value(self, function: str, state: ServiceState, now: int) -> Any:
        (found,) = self.call(f"SELECT fairturn.{function}(STATE, %s::int8)", state, now)
        return found


def to_state(columns: Row) -> ServiceState | None:
    service, *rest = columns
    return None if service is None else ServiceState._make(rest)


def test_the_functions_of_the_server_follow_the_rules_of_outages(
    store: PostgresStore, looking: psycopg.Connection[Any]
) -> None:
    random, rules = Random(SEED), SqlRules(looking)
    for _ in range(1_500):
        now = START + random.randint(0, 10**9)
        before = random_state(random, now)
        last, fence = random.randint(1, 6), random.randint(1, 6)
        asked = random.choice([-1, 0, 999_999, 5_000_000, 120_000_000, 10**13])
        given = Report(random.choice([1, 2]), fence, "down", asked, random.random() < 0.5)

        found = rules.call(
            "SELECT (r.o).*, r.delay, r.counts FROM fairturn.after_report(STATE, %s::text, "
            "%s::int8, %s::int8, %s::text, %s::int8, %s::bool, %s::int8, %s::int8) r",
            before,
            *(SERVICE, *given, last, now),
        )

        expected = outages.after_report(before, given, last_fence=last, now=now)
        case = (before, given, last, now)
        assert (to_state(found[:-2]), *found[-2:]) == expected, case
        if before is None:
            continue
        after = outages.after_success(before, fence, last_fence=last, now=now)
        assert rules.state("after_success", before, fence, last, now) == after, case
        after = outages.after_probe(before, fence, now=now)
        assert rules.state("after_probe", before, fence, now) == after, case
        after = outages.resumed(before, last_fence=last, now=now)
        assert rules.state("resumed", before, last, now) == after, case
        assert rules.value("may_probe", before, now) == outages.may_probe(before, now), case
        assert rules.value("resume_limit", before, now) == outages.running_max(before, now), case
        assert rules.value("is_over", before, now) == outages.is_over(before, now), case


# ── Outages in several transactions at once ──────────────────────────────────────────────────────


def test_a_claim_in_flight_when_a_hold_begins_takes_no_probes(
    store: PostgresStore,
    other: PostgresStore,
    url: str,
    clock: ManualClock,
    looking: psycopg.Connection[Any],
) -> None:
    submit_each(store, "abcdef", kind="ocr")
    first, second = claim(store, 2)
    with psycopg.connect(url) as claiming:
        claiming.execute(
            "SELECT fairturn.claim(gen_random_uuid(), 1, 'w', 30000000, %s::int8, %s::int8, "
            "(SELECT boot FROM fairturn.scheduler_states), 2000, NULL::text[], NULL, NULL)",
            (START, clock.uptime().at),
        )
        reporting = Attempt(lambda: other.finish([report(first), report(second)]))
        wait_until_waiting(looking)
        claiming.commit()
    assert reporting.ended(PATIENCE_S)

    (fence,) = looking.execute("SELECT fence FROM fairturn.outages").fetchall()
    (last,) = looking.execute("SELECT max(fence) FROM fairturn.documents").fetchall()
    assert fence == last


def test_outcomes_wait_for_no_claim_while_no_service_is_unavailable(
    store: PostgresStore, other: PostgresStore, url: str
) -> None:
    submit_each(store, "abc", kind="ocr")
    first, second = claim(store, 2)
    with psycopg.connect(url) as claiming:
        claiming.execute("SELECT FROM fairturn.queue FOR NO KEY UPDATE")
        claiming.execute("SELECT pg_advisory_xact_lock_shared(hashtext('fairturn.'), 7)")

        finishing = Attempt(lambda: other.finish([Completed(first.fence), Released(second.fence)]))

        assert finishing.ended(PATIENCE_S)
        assert finishing.error is None


def test_first_reports_of_two_processes_at_once_hold_their_kind(
    store: PostgresStore, other: PostgresStore, url: str, looking: psycopg.Connection[Any]
) -> None:
    submit_each(store, "abc", kind="ocr")
    first, second = claim(store, 2)
    with psycopg.connect(url) as holding:
        holding.execute("SELECT pg_advisory_xact_lock(hashtext('fairturn.'), 7)")
        reporting = [
            Attempt(lambda: store.finish([report(first)])),
            Attempt(lambda: other.finish([report(second)])),
        ]
        wait_until_waiting(looking, 2)
    assert all(each.ended(PATIENCE_S) for each in reporting)

    assert [outage.service for outage in store.outages()] == ["kind:ocr"]
    assert claim(other) == []


def test_claims_outcomes_renewals_and_resumptions_at_once_lose_nothing(
    store: PostgresStore, url: str, clock: ManualClock
) -> None:
    store.sign_on("w", 4, needs={"ocr": ["s"], "text": ["s", "t"]})
    for n in range(60):
        kind = ("ocr", "text", "default")[n % 3]
        submit(store, f"c{n % 7}", kind=kind, expires_at=START + (n % 5 * 3_600 + 900) * SECOND_US)

    def work(seed: int) -> None:
        random = Random(seed)
        running: list[Claim] = []
        with closing(PostgresStore(url, clock=clock)) as own:
            for _ in range(60):
                outcomes = [_end(random, running.pop()) for _ in range(min(2, len(running)))]
                running += own.claim(
                    random.randint(1, 4), worker="w", lease_us=30 * SECOND_US, outcomes=outcomes
                ).claims
                own.renew([each.fence for each in running], lease_us=30 * SECOND_US)
                if random.random() < 0.3:
                    own.resume(random.choice(["s", "t", "kind:ocr", "kind:text"]))
                if random.random() < 0.2:
                    clock.advance(random.choice([1, 10, 60]))
                    own.expire()
                if random.random() < 0.1:
                    own.prune()
            own.finish([Released(each.fence) for each in running])

    workers = [Attempt(lambda seed=seed: work(seed)) for seed in range(4)]  # type: ignore[misc]
    assert all(each.ended(4 * PATIENCE_S) for each in workers)
    assert [each.error for each in workers] == [None] * 4
    clock.advance(3_600)
    for outage in store.outages():
        store.resume(outage.service)
    clock.advance(60)
    assert_numbers_are_exact(store)


def _end(random: Random, claimed: Claim) -> Outcome:
    fence = claimed.fence
    service = random.choice([None, "s", "t"])
    outcomes: list[Outcome] = [
        OutageReport(fence, "down", SECOND_US, service),
        OutageReport(fence, "down", SECOND_US, service),
        Completed(fence),
        Released(fence),
        Failed(fence, "bad", SECOND_US),
    ]
    return random.choice(outcomes)


# ── Expiry in several transactions at once ───────────────────────────────────────────────────────

_RELEASE = """
    SELECT fairturn.finish(%s::int8, ARRAY[%s::int8], ARRAY[%s::int8], ARRAY[2::int2], NULL, NULL,
        NULL, NULL, NULL, NULL, NULL, NULL)"""
_NUMBER = "SELECT number FROM fairturn.documents ORDER BY number DESC LIMIT 1"


def test_a_document_that_is_given_back_while_expiries_are_recorded_expires_next(
    store: PostgresStore, url: str, clock: ManualClock, looking: psycopg.Connection[Any]
) -> None:
    id = submit(store, expires_at=START + 10 * SECOND_US).id
    ((number,),) = looking.execute(_NUMBER).fetchall()
    (claimed,) = claim(store)
    clock.advance(20)
    with psycopg.connect(url) as releasing:
        releasing.execute(_RELEASE, (clock.now(), number, claimed.fence.number))
        assert (store.expire(), claim(store)) == (0, [])
        releasing.commit()

    assert claim(store) == []

    assert state(store, id) is State.EXPIRED
    assert_numbers_are_exact(store)


def test_a_claim_that_records_expiries_waits_for_no_outcome_and_keeps_the_expiry(
    store: PostgresStore, url: str, clock: ManualClock, looking: psycopg.Connection[Any]
) -> None:
    id = submit(store, expires_at=START + 10 * SECOND_US).id
    ((number,),) = looking.execute(_NUMBER).fetchall()
    (claimed,) = claim(store)
    clock.advance(20)
    with psycopg.connect(url) as expiring:
        expiring.execute("SELECT fairturn.expire_next(%s::int8, 10)", (clock.now(),))
        releasing = Attempt(lambda: store.finish([Released(claimed.fence)]))
        wait_until_waiting(looking)
        expiring.commit()
    assert releasing.ended(PATIENCE_S)

    assert store.expire() == 1

    assert (state(store, id), number > 0) == (State.EXPIRED, True)


def test_a_document_whose_expiry_no_claim_would_find_is_not_handed_out(
    store: PostgresStore, clock: ManualClock, looking: psycopg.Connection[Any]
) -> None:
    expired = submit(store, "a", expires_at=START + 10 * SECOND_US).id
    later = [submit(store, "a").id, submit(store, "b").id]
    looking.execute("DELETE FROM fairturn.expirations")
    clock.advance(10)

    found = claim(store, 5)

    assert sorted(ids(found)) == sorted(later)
    assert state(store, expired) is State.EXPIRED
    assert_numbers_are_exact(store)


@pytest.mark.parametrize(
    "wrong",
    [
        "INSERT INTO fairturn.expirations SELECT n, 10000 + n FROM generate_series(1, 3) n",
        "INSERT INTO fairturn.expirations SELECT 1, number FROM fairturn.documents",
    ],
)
def test_a_wrong_row_of_an_expiry_ends_no_document(
    store: PostgresStore, looking: psycopg.Connection[Any], wrong: str
) -> None:
    made = submit_each(store, "ab")
    looking.execute(wrong)

    assert sorted(ids(claim(store, 5))) == sorted(each.id for each in made)

    assert looking.execute("SELECT count(*) FROM fairturn.expirations").fetchall() == [(0,)]


def test_expiries_are_recorded_without_a_lock_of_the_queue_if_there_are_none(
    store: PostgresStore, url: str
) -> None:
    submit(store, expires_at=START + 10 * SECOND_US)
    with psycopg.connect(url) as holding:
        holding.execute("SELECT FROM fairturn.queue FOR NO KEY UPDATE")

        expiring = Attempt(store.expire)

        assert expiring.ended(PATIENCE_S)
        assert (expiring.error, expiring.answer) == (None, 0)


# ── Releases before this one ─────────────────────────────────────────────────────────────────────

_OLD_CLAIM = """
    SELECT claimed FROM fairturn.claim(gen_random_uuid(), 1, 'w', 30000000, %s::int8, %s::int8,
        (SELECT t.boot FROM fairturn.scheduler_states t ORDER BY t.version DESC LIMIT 1), 2000)"""


@pytest.mark.parametrize("feature", ["expiry", "rule", "outage"])
def test_the_first_expiry_and_the_first_outage_refuse_earlier_releases(
    url: str, clock: ManualClock, looking: psycopg.Connection[Any], feature: str
) -> None:
    with closing(PostgresStore(url, clock=clock)) as store:
        submit(store)
        (claimed,) = claim(store)
        values = (clock.now(), clock.uptime().at)
        assert looking.execute(_OLD_CLAIM, values).fetchall() == [(0,)]
        if feature == "expiry":
            submit(store, expires_at=clock.now() + SECOND_US)
        elif feature == "rule":
            store.configure_kind("default", KindSettings(expires_in_s=60))
        else:
            store.finish([report(claimed)])

        with pytest.raises(psycopg.errors.FeatureNotSupported, match="newer fairturn"):
            looking.execute(_OLD_CLAIM, values)
        newest = "SELECT readable_from FROM fairturn.migrations ORDER BY number DESC LIMIT 1"
        assert looking.execute(newest).fetchall() == [(15,)]
