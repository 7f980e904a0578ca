"""Handlers that come with fairturn."""

from fairturn.worker.handling import ClaimedDocument


def measure(document: ClaimedDocument) -> dict[str, int]:
    """Say how large the document is: what a worker does that has no handler of yours."""
    return {"size_bytes": document.size_bytes}
