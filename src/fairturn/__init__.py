"""A document queue that gives every customer a fair turn.

Names are imported on first use: a process that needs one value does not load the whole queue.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str
    from fairturn.client.async_client import AsyncClient
    from fairturn.client.sync_client import Client
    from fairturn.errors import (
        BrokerRefused,
        ContentDamaged,
        ExpiryPassed,
        FairturnError,
        HandlerNotLoaded,
        KeyReused,
        KindRefused,
        NoQueue,
        NotAllowed,
        NotFound,
        QueueFull,
        QuotaExceeded,
        Refused,
        SettingsConflict,
        StoreBusy,
        StoreError,
        StoreFull,
        StoreRefused,
        StoreUnavailable,
        TraceError,
        WrongState,
    )
    from fairturn.model import (
        Claim,
        Completed,
        Customer,
        Document,
        Failed,
        Kind,
        Page,
        Receipt,
        Released,
        Settings,
        State,
        Stopped,
        Submission,
        Summary,
    )
    from fairturn.queue import Queue
    from fairturn.worker.backoff import Backoff
    from fairturn.worker.handler import ClaimedDocument
    from fairturn.worker.registry import Handlers
    from fairturn.worker.results import GiveUp, Later, Next, ResultFile, Retry, Unavailable
    from fairturn.worker.worker import Worker

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
    "Handlers",
    "ClaimedDocument",
    "ResultFile",
    "Next",
    "Later",
    "Unavailable",
    "Retry",
    "GiveUp",
    "Backoff",
    "Customer",
    "Kind",
    "Summary",
    "Settings",
    # Errors, to the end of the list; `_HOMES` relies on that.
    "FairturnError",
    "Refused",
    "QueueFull",
    "QuotaExceeded",
    "KindRefused",
    "ExpiryPassed",
    "KeyReused",
    "NotFound",
    "NotAllowed",
    "WrongState",
    "SettingsConflict",
    "HandlerNotLoaded",
    "ContentDamaged",
    "BrokerRefused",
    "TraceError",
    "StoreError",
    "StoreRefused",
    "NoQueue",
    "StoreUnavailable",
    "StoreBusy",
    "StoreFull",
]

# The module of each public name that is not defined in `fairturn.model`.
_HOMES = {
    **dict.fromkeys(__all__[__all__.index("FairturnError") :], "fairturn.errors"),
    "Queue": "fairturn.queue",
    "Client": "fairturn.client.sync_client",
    "AsyncClient": "fairturn.client.async_client",
    "Worker": "fairturn.worker.worker",
    "Handlers": "fairturn.worker.registry",
    "ClaimedDocument": "fairturn.worker.handler",
    **dict.fromkeys(
        ("ResultFile", "Next", "Later", "Unavailable", "Retry", "GiveUp"),
        "fairturn.worker.results",
    ),
    "Backoff": "fairturn.worker.backoff",
}

if not TYPE_CHECKING:  # a type checker that saw `__getattr__` would accept any name

    def __getattr__(name: str) -> object:
        if name == "__version__":
            from importlib.metadata import version

            value = version("fairturn")
        elif name not in __all__:
            raise AttributeError(f"module 'fairturn' has no attribute {name!r}")
        else:
            home = _HOMES.get(name, "fairturn.model")
            value = getattr(import_module(home), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
