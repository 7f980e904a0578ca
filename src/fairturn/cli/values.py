"""Documents and customers as commands print them."""

from collections.abc import Sequence
from typing import Any

from fairturn.cli.terminal import age, console, print_table, printable
from fairturn.model import Customer, Document
from fairturn.wire import CUSTOMER, CUSTOMER_SETTINGS, DOCUMENT, to_json

_COUNT_FROM = 90  # columns of a terminal; narrower ones have no room for the count
_LIST = ("id", "customer", "state", "priority", "count", "age", "name")


def document_as_json(document: Document) -> dict[str, Any]:
    return to_json(DOCUMENT, document)


def stopping(document: Document) -> bool:
    """Return whether a cancelled document is still running."""
    return document.cancel_requested and not document.ended


def customer_as_json(customer: Customer) -> dict[str, Any]:
    """Return the fields of a customer and of its settings."""
    return {**to_json(CUSTOMER, customer), **to_json(CUSTOMER_SETTINGS, customer.settings)}


def print_documents(documents: Sequence[Document], now: int) -> None:
    rows = [
        [
            document.id,
            printable(document.customer),
            "stopping" if stopping(document) else document.state.value,
            str(document.priority),
            str(document.count),
            age(now - document.submitted_at_us),
            printable(document.name or ""),
        ]
        for document in documents
    ]
    screen = console()
    columns = list(_LIST)
    if screen.width < _COUNT_FROM:
        for row in (columns, *rows):
            del row[_LIST.index("count")]
    print_table(screen, columns, rows, texts=(1, len(columns) - 1), words=(0, 2))
