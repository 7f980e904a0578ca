"""Documents, customers and kinds of work as commands print them."""

from collections.abc import Sequence
from typing import Any

from fairturn.cli.terminal import age, console, print_table, printable
from fairturn.model import DEFAULT_KIND_NAME, Customer, Document, Kind
from fairturn.wire import CUSTOMER, CUSTOMER_SETTINGS, DOCUMENT, KIND, KIND_SETTINGS, to_json

# The width of a terminal from which on there is room for a column, without and with kinds of work.
_WIDTHS, _WIDTHS_WITH_KINDS = {"count": 90}, {"count": 105, "priority": 90, "age": 90}
_LIST = ("id", "customer", "state", "kind", "priority", "count", "age", "name")


def document_as_json(document: Document) -> dict[str, Any]:
    return to_json(DOCUMENT, document)


def stopping(document: Document) -> bool:
    """Return whether a cancelled document is still running."""
    return document.cancel_requested and not document.ended


def customer_as_json(customer: Customer) -> dict[str, Any]:
    """Return the fields of a customer and of its settings."""
    return {**to_json(CUSTOMER, customer), **to_json(CUSTOMER_SETTINGS, customer.settings)}


def kind_as_json(kind: Kind) -> dict[str, Any]:
    """Return the fields of a kind of work and of its settings."""
    return {**to_json(KIND, kind), **to_json(KIND_SETTINGS, kind.settings)}


def print_documents(documents: Sequence[Document], now: int) -> None:
    """Print a table; the column of kinds only if a document has another than the default kind."""
    screen = console()
    has_kinds = any(document.kind != DEFAULT_KIND_NAME for document in documents)
    widths = _WIDTHS_WITH_KINDS if has_kinds else _WIDTHS
    columns = [
        column
        for column in _LIST
        if screen.width >= widths.get(column, 0) and (has_kinds or column != "kind")
    ]
    rows = [_cells(document, now) for document in documents]
    print_table(
        screen,
        columns,
        [[row[column] for column in columns] for row in rows],
        texts=[n for n, column in enumerate(columns) if column in ("customer", "kind", "name")],
        words=[n for n, column in enumerate(columns) if column in ("id", "state")],
    )


def _cells(document: Document, now: int) -> dict[str, str]:
    """Return the cells of a document by column."""
    return {
        "id": document.id,
        "customer": printable(document.customer),
        "state": "stopping" if stopping(document) else document.state.value,
        "kind": document.kind,
        "priority": str(document.priority),
        "count": str(document.count),
        "age": age(now - document.submitted_at_us),
        "name": printable(document.name or ""),
    }
