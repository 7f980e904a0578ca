"""An independent recount of a PostgreSQL queue from the rows of its documents.

`differences` compares the documents with everything that the store derives from them: `summary`,
`customers`, `kinds`, the flows and the leases. It shares no code with the store. The statements
below are the only part of the fault tests that depends on the schema.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import psycopg

from fairturn.model import Customer, Kind, Summary

LEVELS = 9
DELAYED, WAITING, RUNNING = 0, 1, 2  # documents.state

_DOCUMENTS = """
    SELECT d.number, c.name, d.customer, d.level, d.priority, d.state, d.fence, d.order_number,
        k.name
    FROM fairturn.documents d LEFT JOIN fairturn.customers c ON c.number = d.customer
        LEFT JOIN fairturn.kinds k ON k.number = d.kind"""
_CUSTOMERS = "SELECT number, name FROM fairturn.customers"
_FLOWS = "SELECT customer, level, folded, head_order FROM fairturn.flows"
_LEASES = "SELECT fence, running, documents FROM fairturn.leases"
_PENDING = """
    SELECT (SELECT count(*) FROM fairturn.event_log),
        (SELECT count(*) FROM fairturn.counter_changes)"""

# Statements with the effects of known defects, for the test of the recount.
DAMAGES = {
    "a waiting document deleted": f"""
        DELETE FROM fairturn.documents WHERE number = (
            SELECT min(number) FROM fairturn.documents WHERE state = {WAITING})""",
    "a document stuck in running": f"""
        UPDATE fairturn.documents SET state = {RUNNING} WHERE number = (
            SELECT min(number) FROM fairturn.documents WHERE state = {WAITING})""",
    "a lease deleted": "DELETE FROM fairturn.leases",
    "a flow that counts too many": "UPDATE fairturn.flows SET folded = folded + 1",
    "a flow with another head": "UPDATE fairturn.flows SET head_order = head_order + 1000",
    "a customer that counts too many": """
        UPDATE fairturn.customers SET arrived[1] = arrived[1] + 1""",
    "a summary that counts too many": """
        UPDATE fairturn.arrival_counters SET arrived[1] = arrived[1] + 1 WHERE shard = 0""",
    "a delayed document deleted": f"DELETE FROM fairturn.documents WHERE state = {DELAYED}",
}


class _Document(NamedTuple):
    number: int
    name: str | None  # of its customer; None if that row is missing
    customer: int
    level: int
    priority: int
    state: int
    fence: int
    order: int | None
    kind: str | None


def differences(store: Any, url: str) -> list[str]:
    """Return sentences about every counter that disagrees with the documents.

    A claim of no document first folds all events, so that flows are complete. No other call may be
    in flight."""
    fold(store)
    return compared(store, url)


def fold(store: Any) -> None:
    """Let a claim fold all events."""
    store.claim(0, worker="recount", lease_us=1_000_000)


def compared(store: Any, url: str) -> list[str]:
    """Return the same differences without a claim before."""
    with psycopg.connect(url) as connection:
        documents = [_Document(*row) for row in connection.execute(_DOCUMENTS)]
        names: dict[int, str] = dict(connection.execute(_CUSTOMERS).fetchall())
        flows = connection.execute(_FLOWS).fetchall()
        leases = connection.execute(_LEASES).fetchall()
        ((recorded, moved),) = connection.execute(_PENDING).fetchall()
    found = [
        *_orphans(documents),
        *_summary(documents, store.summary()),
        *_customers(documents, _all_customers(store)),
        *_kinds(documents, store.kinds()),
        *_flows(documents, flows, names),
        *_leases(documents, leases),
    ]
    if recorded or moved:
        found.append(f"{recorded} events and {moved} moves are left after a claim")
    return found


def _all_customers(store: Any) -> list[Customer]:
    customers: list[Customer] = []
    after = None
    while True:
        page = store.customers(after=after, size=1_000)
        customers += page.customers
        if page.next is None:
            return customers
        after = page.next


def _orphans(documents: list[_Document]) -> Iterator[str]:
    for document in documents:
        if document.name is None:
            yield f"document {document.number} has no customer"


def _by_priority(documents: list[_Document]) -> tuple[int, ...]:
    counted = Counter(document.priority for document in documents if document.state == WAITING)
    return tuple(counted[priority] for priority in range(1, LEVELS + 1))


def _in_state(documents: list[_Document], state: int) -> int:
    return sum(document.state == state for document in documents)


def _summary(documents: list[_Document], summary: Summary) -> Iterator[str]:
    pairs = (
        ("waiting by priority", summary.waiting_by_priority, _by_priority(documents)),
        ("delayed", summary.delayed, _in_state(documents, DELAYED)),
        ("running", summary.running, _in_state(documents, RUNNING)),
    )
    for what, shown, counted in pairs:
        if shown != counted:
            yield f"summary: {what} is {shown}; the documents add up to {counted}"


def _customers(documents: list[_Document], customers: list[Customer]) -> Iterator[str]:
    shown_names = {customer.name for customer in customers}
    for name in sorted({document.name or "?" for document in documents} - shown_names):
        yield f"customer {name} has documents and is not listed"
    for customer in customers:
        own = [document for document in documents if document.name == customer.name]
        pairs = (
            ("waiting by priority", customer.waiting_by_priority, _by_priority(own)),
            ("waiting", customer.waiting, _in_state(own, WAITING)),
            ("delayed", customer.delayed, _in_state(own, DELAYED)),
            ("running", customer.running, _in_state(own, RUNNING)),
        )
        for what, shown, counted in pairs:
            if shown != counted:
                yield (
                    f"customer {customer.name}: {what} is {shown}; "
                    f"the documents add up to {counted}"
                )


def _kinds(documents: list[_Document], kinds: list[Kind]) -> Iterator[str]:
    for document in documents:
        if document.kind not in {kind.name for kind in kinds}:
            yield f"document {document.number} has the kind {document.kind}, which is not listed"
    for kind in kinds:
        own = [document for document in documents if document.kind == kind.name]
        shown = (kind.waiting, kind.running)
        counted = (_in_state(own, WAITING), _in_state(own, RUNNING))
        if shown != counted:
            yield f"kind {kind.name}: {shown} wait and run; the documents add up to {counted}"


def _flows(documents: list[_Document], flows: list[Any], names: dict[int, str]) -> Iterator[str]:
    waiting: Counter[tuple[int, int]] = Counter()
    heads: dict[tuple[int, int], int] = {}
    for document in documents:
        if document.state == WAITING:
            flow = (document.customer, document.level)
            waiting[flow] += 1
            if document.order is None:
                yield f"document {document.number} waits and has no order"
                continue
            heads[flow] = min(document.order, heads.get(flow, document.order))
    stored = Counter((customer, level) for customer, level, *_ in flows)
    for (customer, level), n in stored.items():
        if n > 1:
            yield f"flow of customer {names.get(customer, customer)}, level {level}: {n} rows"
    folded = {(customer, level): n for customer, level, n, _ in flows}
    for flow in sorted(waiting.keys() | folded.keys()):
        if waiting[flow] != folded.get(flow, 0):
            yield (
                f"flow of customer {names.get(flow[0], flow[0])}, level {flow[1]}: "
                f"{folded.get(flow, 0)} waiting; the documents add up to {waiting[flow]}"
            )
    for customer, level, n, head in flows:
        if n and (customer, level) in heads and head != heads[customer, level]:
            yield (
                f"flow of customer {names.get(customer, customer)}, level {level}: its head is "
                f"{head}; the lowest order that waits is {heads[customer, level]}"
            )


def _leases(documents: list[_Document], leases: list[Any]) -> Iterator[str]:
    running = {
        document.number: document.fence for document in documents if document.state == RUNNING
    }
    leased: dict[int, int] = {}
    for fence, n, numbers in leases:
        own = [number for number in numbers if running.get(number) == fence]
        if len(own) != n:
            yield f"lease {fence}: running is {n}; {len(own)} of its documents run"
        leased.update(dict.fromkeys(own, fence))
    for number in sorted(running.keys() - leased.keys()):
        yield f"document {number} runs and no lease names it"
