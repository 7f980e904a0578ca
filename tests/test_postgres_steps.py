"""PostgreSQL: steps and attempts beside other transactions, and processes of earlier releases."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any
from uuid import UUID

import psycopg
import pytest

from fairturn.clock import SECOND_US
from fairturn.model import (
    KINDS_MAX,
    Advanced,
    Claim,
    Completed,
    Failed,
    Fence,
    KindPolicy,
    NewDocument,
    Outcome,
    Settings,
    State,
)
from fairturn.stores.conformance.steps import claim, claim_one, state, submit
from fairturn.stores.ids import decode
from fairturn.stores.postgres import PostgresStore
from fairturn.stores.postgres.finish import FINISH, outcome_columns
from tests.attempt import Attempt
from tests.on_postgres import wait_until_waiting

LEASE_US = 30 * SECOND_US


@pytest.fixture
def store(url: str) -> Iterator[PostgresStore]:
    with closing(PostgresStore(url, settings=Settings(kinds=KindPolicy.OPEN))) as opened:
        yield opened


def wait_for(url: str, call: Attempt) -> None:
    """Wait until a call waits for a lock of another transaction."""
    with psycopg.connect(url, autocommit=True) as looking:
        wait_until_waiting(looking)
    assert not call.ended(0)


def number_of(store: PostgresStore, fence: Fence) -> int | None:
    return decode(fence.document, store._key)


def renew_unfinished(
    connection: psycopg.Connection[Any], store: PostgresStore, claimed: Claim
) -> None:
    """Store a checkpoint in a transaction that has not committed."""
    connection.execute(
        "SELECT fairturn.renew(NULL, %s, %s::int8[], %s::int8[], %s::text[], %s::text[])",
        (LEASE_US, [number_of(store, claimed.fence)], [claimed.fence.number], [None], ['"late"']),
    )


def finish_unfinished(
    connection: psycopg.Connection[Any], store: PostgresStore, *outcomes: Outcome
) -> None:
    """Record outcomes in a transaction that has not committed."""
    statement = FINISH.replace("%s::int8,", "NULL::int8,", 1)
    connection.execute(statement, outcome_columns(outcomes, store._key))


def test_the_end_of_a_step_deletes_a_checkpoint_that_a_renewal_stores_meanwhile(
    url: str, store: PostgresStore
) -> None:
    submit(store)
    claimed = claim_one(store)
    with psycopg.connect(url) as renewing:
        renew_unfinished(renewing, store, claimed)
        ending = Attempt(lambda: store.finish([Advanced(claimed.fence, "ocr")]))
        wait_for(url, ending)
        renewing.commit()
        assert ending.ended()

    assert (ending.error, ending.answer) == (None, [])
    assert claim_one(store).checkpoint is None


def test_a_renewal_that_waited_for_the_end_of_the_step_stores_no_checkpoint(
    url: str, store: PostgresStore
) -> None:
    submit(store)
    claimed = claim_one(store)
    with psycopg.connect(url) as ending:
        finish_unfinished(ending, store, Advanced(claimed.fence, "ocr"))
        renewal = Attempt(
            lambda: store.renew(
                [claimed.fence], lease_us=LEASE_US, checkpoints={claimed.fence: '"late"'}
            )
        )
        wait_for(url, renewal)
        ending.commit()
        assert renewal.ended()

    assert renewal.answer.lost == [claimed.fence]
    assert claim_one(store).checkpoint is None


def test_two_steps_that_create_the_same_kind_at_once_wait_in_one_kind(
    url: str, store: PostgresStore
) -> None:
    for customer in "ab":
        submit(store, customer)
    first, second = claim(store, 2)
    with psycopg.connect(url) as ending:
        finish_unfinished(ending, store, Advanced(first.fence, "ocr"))
        other = Attempt(lambda: store.finish([Advanced(second.fence, "ocr")]))
        wait_for(url, other)
        ending.commit()
        assert other.ended()

    assert (other.error, other.answer) == (None, [])
    assert [(k.name, k.waiting) for k in store.kinds()] == [("default", 0), ("ocr", 2)]


def test_a_claim_that_waits_to_create_a_kind_blocks_no_other_claim(
    url: str, store: PostgresStore
) -> None:
    for customer in "ab":
        submit(store, customer)
    first = claim_one(store)
    with psycopg.connect(url) as callers:
        store.submit([NewDocument("c", "1", kind="ocr")], connection=callers)
        claiming = Attempt(
            lambda: claim(store, outcomes=[Advanced(first.fence, "text")], kinds=["text"])
        )
        wait_for(url, claiming)

        assert len(claim(store)) == 1

        assert not claiming.ended(0)
        callers.commit()
        assert claiming.ended()

    assert [each.document.id for each in claiming.answer] == [first.document.id]


def test_of_the_new_kinds_of_one_call_those_are_created_that_the_queue_has_room_for(
    store: PostgresStore,
) -> None:
    store.sign_on("w", 1, [f"kind-{n}" for n in range(KINDS_MAX - 2)])
    for customer in "abc":
        submit(store, customer)
    first, second, third = claim(store, 3)

    store.finish(
        [
            Advanced(first.fence, "z-last"),
            Advanced(second.fence, "a-first"),
            Advanced(third.fence, "z-last"),
        ]
    )

    states = [state(store, each.document.id) for each in (first, second, third)]
    assert states == [State.WAITING, State.DEAD, State.WAITING]
    assert "a-first" not in {kind.name for kind in store.kinds()}


def test_an_outcome_that_does_not_count_creates_no_kind(store: PostgresStore) -> None:
    submit(store)
    claimed = claim_one(store)

    lost = store.finish([Completed(claimed.fence), Advanced(claimed.fence, "ocr")])

    assert lost == [claimed.fence]
    assert [kind.name for kind in store.kinds()] == ["default"]


_TOKEN = UUID(int=7)
_CLAIM_OF_ONE = """
    SELECT fairturn.claim(%s, 1, 'w', 30000000, NULL, NULL, 'server', 100, NULL, NULL, NULL)"""
_CLAIMED = "SELECT * FROM fairturn.claimed(%s)"
_SCANS_OF_ATTEMPTS = """
    SELECT seq_scan + idx_scan FROM pg_stat_xact_user_tables WHERE relname = 'attempts'"""


def test_a_claim_reads_attempts_only_of_documents_that_have_finished_a_step(
    url: str, store: PostgresStore
) -> None:
    for customer in "ab":
        submit(store, customer)
    stepping, failing = claim(store, 2)
    store.finish([Failed(failing.fence, "x", 0)])

    def reads() -> int:
        """Return the number of scans of `attempts` by the claim of one document."""
        with psycopg.connect(url) as claiming:
            claiming.execute(_CLAIM_OF_ONE, (_TOKEN,))
            assert len(claiming.execute(_CLAIMED, (_TOKEN,)).fetchall()) == 1
            ((n,),) = claiming.execute(_SCANS_OF_ATTEMPTS).fetchall()
            claiming.rollback()
            return int(n)

    assert reads() == 0

    store.finish([Advanced(stepping.fence, "default")])
    store.cancel([failing.document.id])
    assert reads() > 0


# ── Releases up to schema 13 ─────────────────────────────────────────────────────────────────────

_CLAIM_OF_SCHEMA_13 = """
    SELECT claimed FROM fairturn.claim(gen_random_uuid(), 1, 'old', 30000000, NULL, NULL, 'server',
        100)"""
_FINISH_OF_SCHEMA_13 = """
    SELECT fairturn.finish(NULL::int8, %s::int8[], %s::int8[], ARRAY[0]::int2[],
        ARRAY[NULL]::text[], ARRAY[NULL]::int8[], ARRAY[NULL]::int8[], ARRAY[NULL]::int8[],
        ARRAY[NULL]::text[],
        ARRAY[NULL]::text[], ARRAY[NULL]::int8[], ARRAY[NULL]::bytea[])"""
_RENEW_OF_SCHEMA_13 = """
    SELECT its_fence FROM fairturn.renew(NULL, 30000000, %s::int8[], %s::int8[],
        ARRAY[NULL]::text[])"""
_PRUNE_OF_SCHEMA_13 = """
    SELECT finished FROM fairturn.prune(NULL, 100, ARRAY[NULL, NULL, NULL, 0, 0, 0]::int8[])"""


def test_a_process_of_schema_13_works_until_a_document_has_finished_a_step(
    url: str, store: PostgresStore
) -> None:
    for customer in "ab":
        submit(store, customer)
    running = claim_one(store)
    named = [[number_of(store, running.fence)], [running.fence.number]]
    with psycopg.connect(url, autocommit=True) as old:
        assert old.execute(_CLAIM_OF_SCHEMA_13).fetchall() == [(1,)]
        assert old.execute(_RENEW_OF_SCHEMA_13, named).fetchall() == [(running.fence.number,)]
        assert old.execute(_PRUNE_OF_SCHEMA_13).fetchall() == [(True,)]
        submit(store, "c")
        stepping = claim_one(store)

        store.finish([Advanced(stepping.fence, "default")])

        for statement in (_CLAIM_OF_SCHEMA_13, _PRUNE_OF_SCHEMA_13):
            with pytest.raises(psycopg.errors.FeatureNotSupported, match="steps"):
                old.execute(statement)
        assert old.execute(_FINISH_OF_SCHEMA_13, named).fetchall() == [([],)]
    assert state(store, running.document.id) is State.COMPLETED
    assert claim_one(store).document.id == stepping.document.id


def test_a_claim_of_schema_13_that_waited_for_the_first_step_takes_nothing(
    url: str, store: PostgresStore
) -> None:
    submit(store)
    stepping = claim_one(store)
    with psycopg.connect(url) as ending:
        ending.execute("SELECT FROM fairturn.queue FOR NO KEY UPDATE")
        finish_unfinished(ending, store, Advanced(stepping.fence, "default"))
        with psycopg.connect(url, autocommit=True) as old:
            submit(store, "b")
            claiming = Attempt(lambda: old.execute(_CLAIM_OF_SCHEMA_13))
            wait_for(url, claiming)
            ending.commit()
            assert claiming.ended()

    assert isinstance(claiming.error, psycopg.errors.FeatureNotSupported)
    assert len(claim(store, 2)) == 2
