"""The handler of the demos."""

import time

from fairturn.worker.handler import ClaimedDocument


def rest(document: ClaimedDocument) -> None:
    """Sleep for the `seconds` of the payload."""
    time.sleep(document.payload["seconds"])
