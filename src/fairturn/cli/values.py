"""Documents and customers as they are printed: the field names are those of Python."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fairturn.cli.terminal import age, console, print_table, printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fairturn.model import Customer, Document

_LIST = ("id", "customer", "state", "priority", "count", "age", "name")


def document_as_json(document: "Document") -> dict[str, Any]:
    """The fields of a document; metadata as an object, the checksum in hexadecimal digits."""
    fields = document._asdict()
    del fields["metadata_json"]
    sha256 = document.sha256
    return {
        **fields,
        "sha256": None if sha256 is None else sha256.hex(),
        "metadata": document.metadata,
    }


def stopping(document: "Document") -> bool:
    """Whether its worker is to stop, and has not yet."""
    return document.cancel_requested and not document.ended


def customer_as_json(customer: "Customer") -> dict[str, Any]:
    """The fields of a customer."""
    return asdict(customer)


def print_documents(documents: "Sequence[Document]", now: int) -> None:
    """A table of documents."""
    rows = [
        [
            document.id,
            printable(document.customer),
            "stopping" if stopping(document) else document.state.value,
            str(document.priority),
            str(document.count),
            age(now - document.submitted_at),
            printable(document.name or ""),
        ]
        for document in documents
    ]
    print_table(console(), _LIST, rows, texts=(1, 6), words=(0, 2))
