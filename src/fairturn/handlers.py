"""Handlers that come with fairturn."""

import time

from fairturn.worker.handling import ClaimedDocument


def measure(document: ClaimedDocument) -> dict[str, int]:
    """Say how large the document is: what a worker does that has no handler of yours."""
    return {"size_bytes": document.size_bytes}


def rest(document: ClaimedDocument) -> None:
    """Take as many seconds as the payload says, and do nothing: for demonstrations."""
    time.sleep(document.payload["seconds"])
