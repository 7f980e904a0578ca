"""The recount of a queue on a server, and repairs of what it finds. The work is in SQL: see
`functions/audit.sql` and `functions/repair.sql`."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from fairturn.stores.inspection import Damage, Damages
from fairturn.stores.postgres.admin import REPAIR_CUSTOMERS, REPAIR_QUEUE
from fairturn.stores.postgres.claim import BUDGET
from fairturn.stores.postgres.connection import POOL_MAX, Database
from fairturn.stores.postgres.session import SCHEMA, Session
from fairturn.stores.values import Row

STEPS = ("queue", "flows", "customers", "documents", "leases")
# How many customers, leases or rows one transaction repairs. The queue is locked meanwhile.
BATCH = 100
_PAGE = 1_000

_DECLARE = """
    DECLARE damages NO SCROLL CURSOR FOR
    SELECT a.kind, a.customer, c.name, a.place, a.stored, a.truth
    FROM fairturn.audit_{step}() a LEFT JOIN fairturn.customers c ON c.number = a.customer"""
_FETCH = f"FETCH {_PAGE} FROM damages"
_CLOSE = "CLOSE damages"

_REPAIR_LEASES = "SELECT fairturn.repair_leases(%s::int8[], %s::int8[], %s::int4)"
_REPAIR_ROWS = "SELECT fairturn.repair_rows(%s::int8[])"


def recount(session: Session, advance: Callable[[int, int], None]) -> Iterator[Damage]:
    """Compare every stored value that is derived from documents with the documents, in the
    snapshot of the session."""
    for done, step in enumerate(STEPS):
        advance(done, len(STEPS))
        session.ask(_DECLARE.format(step=step))
        while rows := session.fetch(_FETCH):
            yield from (Damage(*row) for row in rows)
        session.ask(_CLOSE)
    advance(len(STEPS), len(STEPS))


def repair(url: str, damages: Damages, advance: Callable[[int, int], None]) -> None:
    """Repair what a recount has found, in batches. Other processes work on in between."""
    database = Database(url, schema=SCHEMA, pool_max=POOL_MAX, prepare=False)
    calls: list[tuple[str, Row]] = []
    if damages.queue:
        calls.append((REPAIR_QUEUE, (BUDGET,)))
    calls += [(_REPAIR_LEASES, (b, [], BUDGET)) for b in _batches(damages.fences)]
    calls += [(_REPAIR_LEASES, ([], b, BUDGET)) for b in _batches(damages.unleased)]
    calls += [(REPAIR_CUSTOMERS, (b, BUDGET)) for b in _batches(damages.customers)]
    calls += [(_REPAIR_ROWS, (b,)) for b in _batches(damages.orphans)]
    try:
        for done, (statement, values) in enumerate(calls):
            advance(done, len(calls))
            while not _call(database, statement, values):
                pass  # it has applied some of the recorded events
    finally:
        database.close()


def _call(database: Database, statement: str, values: Row) -> bool:
    def work(session: Session) -> bool:
        ((done,),) = session.fetch(statement, values)
        return bool(done)

    return database.transact(work)


def _batches(numbers: Iterable[int]) -> Iterator[list[int]]:
    left = iter(sorted(numbers))
    while batch := list(islice(left, BATCH)):
        yield batch
