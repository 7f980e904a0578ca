"""A document queue that gives every customer a fair turn.

The errors are in `fairturn.errors`, and all values in `fairturn.model`. A name is loaded when it is
first used, so that a process that needs one value does not load the whole queue.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fairturn.client.async_client import AsyncClient
    from fairturn.client.sync_client import Client
    from fairturn.config import Queue
    from fairturn.errors import (
        FairturnError,
        KeyReused,
        NotAllowed,
        NotFound,
        QueueFull,
        Refused,
        WrongState,
    )
    from fairturn.model import (
        Claim,
        Completed,
        Customer,
        Document,
        Failed,
        Page,
        Receipt,
        Released,
        Settings,
        State,
        Stopped,
        Submission,
        Summary,
    )
    from fairturn.worker import Worker
    from fairturn.worker.backoff import Delays
    from fairturn.worker.handler import ClaimedDocument, NeverAgain, ResultFile, TryAgain

__all__ = [
    "Queue",
    "Client",
    "AsyncClient",
    "Submission",
    "Receipt",
    "Document",
    "State",
    "Page",
    "Claim",
    "Completed",
    "Failed",
    "Released",
    "Stopped",
    "Worker",
    "ClaimedDocument",
    "TryAgain",
    "NeverAgain",
    "ResultFile",
    "Delays",
    "Customer",
    "Summary",
    "Settings",
    "FairturnError",
    "Refused",
    "QueueFull",
    "KeyReused",
    "NotFound",
    "NotAllowed",
    "WrongState",
]

# Where a name lives, unless it is one of the values in fairturn.model.
_HOMES = {
    "Queue": "fairturn.config",
    "Client": "fairturn.client.sync_client",
    "AsyncClient": "fairturn.client.async_client",
    "FairturnError": "fairturn.errors",
    "Refused": "fairturn.errors",
    "QueueFull": "fairturn.errors",
    "KeyReused": "fairturn.errors",
    "NotFound": "fairturn.errors",
    "NotAllowed": "fairturn.errors",
    "WrongState": "fairturn.errors",
    "Worker": "fairturn.worker",
    "ClaimedDocument": "fairturn.worker.handler",
    "TryAgain": "fairturn.worker.handler",
    "NeverAgain": "fairturn.worker.handler",
    "ResultFile": "fairturn.worker.handler",
    "Delays": "fairturn.worker.backoff",
}

if not TYPE_CHECKING:  # a checker that saw this would believe in every name

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module 'fairturn' has no attribute {name!r}")
        value = getattr(import_module(_HOMES.get(name, "fairturn.model")), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
