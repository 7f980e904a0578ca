"""A document queue that gives every customer a fair turn.

The errors are in `fairturn.errors`, and all values in `fairturn.model`.
"""

from fairturn.config import Queue
from fairturn.errors import FairturnError, KeyReused, NotFound, QueueFull, Refused, WrongState
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

__all__ = [
    "Queue",
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
    "Customer",
    "Summary",
    "Settings",
    "FairturnError",
    "Refused",
    "QueueFull",
    "KeyReused",
    "NotFound",
    "WrongState",
]
