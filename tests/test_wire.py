"""The proxy that the fault tests rely on: it cuts and holds exactly where requested."""

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from tests.attempt import Attempt
from tests.servers import postgres
from tests.servers.queues import Databases
from tests.servers.wire import Action, Fault, Moment, Wire

PATIENCE_S = 10.0


@pytest.fixture
def wire(databases: Databases) -> Iterator[Wire]:
    name = databases.new(empty=True).rpartition("/")[2].partition("?")[0]
    with Wire(postgres.of_this_run().url(name, tcp=True)) as opened:
        with psycopg.connect(opened.url, autocommit=True) as connection:
            connection.execute("CREATE TABLE numbers (n bigint)")
        yield opened


def insert(connection: psycopg.Connection[Any]) -> None:
    connection.execute("INSERT INTO numbers VALUES (1)")


def insert_prepared(connection: psycopg.Connection[Any]) -> None:
    connection.execute("INSERT INTO numbers VALUES (%s)", (1,), prepare=True)


def insert_in_a_pipeline(connection: psycopg.Connection[Any]) -> None:
    with connection.pipeline():
        connection.execute("INSERT INTO numbers VALUES (%s)", (1,))


def insert_in_a_pipeline_with_flush(connection: psycopg.Connection[Any]) -> None:
    with connection.pipeline():
        connection.execute("INSERT INTO numbers VALUES (%s) RETURNING n", (1,)).fetchall()


def copy(connection: psycopg.Connection[Any]) -> None:
    with connection.cursor().copy("COPY numbers FROM STDIN") as copying:
        copying.write_row((1,))


CALLS = (
    insert,
    insert_prepared,
    insert_in_a_pipeline,
    insert_in_a_pipeline_with_flush,
    copy,
)


def rows(wire: Wire) -> int:
    wire.watch()
    with psycopg.connect(wire.url, autocommit=True) as connection:
        ((n,),) = connection.execute("SELECT count(*) FROM numbers").fetchall()
    return int(n)


@pytest.mark.parametrize("call", CALLS)
def test_without_a_fault_everything_passes(
    wire: Wire, call: Callable[[psycopg.Connection[Any]], None]
) -> None:
    with psycopg.connect(wire.url, autocommit=True) as connection:
        call(connection)
        call(connection)

    assert rows(wire) == 2


@pytest.mark.parametrize("call", CALLS)
def test_a_connection_is_cut_exactly_before_or_after_an_exchange(
    wire: Wire, call: Callable[[psycopg.Connection[Any]], None]
) -> None:
    with psycopg.connect(wire.url, autocommit=True) as connection:
        wire.watch()
        call(connection)
        last = len(wire.exchanges)

    stored = []
    for number in range(1, last + 1):
        for moment in Moment:
            before = rows(wire)
            connection = psycopg.connect(wire.url, autocommit=True)
            wire.watch(Fault(number, moment))
            with pytest.raises(psycopg.OperationalError), connection:
                call(connection)
            assert wire.happened
            stored.append(rows(wire) - before)

    # Nothing before the first exchange, all after the last; both sides of a gap are equal.
    assert (stored[0], stored[-1]) == (0, 1)
    assert stored[1:-1:2] == stored[2::2]


@pytest.mark.parametrize("moment", list(Moment))
def test_a_connection_is_held_until_it_is_released(wire: Wire, moment: Moment) -> None:
    with psycopg.connect(wire.url, autocommit=True) as connection:
        wire.watch(Fault(1, moment, Action.HOLD))
        call = Attempt(lambda: insert(connection), at_end=wire.reached)
        assert wire.reached.wait(PATIENCE_S)
        assert wire.happened
        with psycopg.connect(wire.url) as looking:
            seen = looking.execute("SELECT count(*) FROM numbers").fetchall()
        assert not call.ended(0)
        wire.release()
        assert call.ended(PATIENCE_S)

    assert seen == [(1 if moment is Moment.AFTER else 0,)]
    assert call.error is None
    assert rows(wire) == 1
