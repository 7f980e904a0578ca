"""The whole contract of `fairturn.store` as one class of tests.

An author of a store writes a class of tests that inherits from one of the two and provides the
fixture `open_store`; what each test promises is its name.
"""

from fairturn.testing.admitting import AccessKeys, Glancing
from fairturn.testing.cancelling import Cancelling, ReportingCancels, Retrying
from fairturn.testing.claiming import Claiming, Turning
from fairturn.testing.configuring import Configuring
from fairturn.testing.durability import Durability
from fairturn.testing.epochs import Epochs
from fairturn.testing.explaining import Explaining
from fairturn.testing.forgetting import Pruning, Purging
from fairturn.testing.leases import Leases, Renewing
from fairturn.testing.limits import DueTimes, Limits
from fairturn.testing.order import Order
from fairturn.testing.outcomes import Outcomes
from fairturn.testing.progressing import Progressing
from fairturn.testing.reading import Customers, Finding, Numbers
from fairturn.testing.submitting import Submitting
from fairturn.testing.upcoming import Upcoming
from fairturn.testing.watching import Watching


class StoreConformance(
    Submitting,
    Limits,
    DueTimes,
    Order,
    Claiming,
    Turning,
    Leases,
    Renewing,
    Progressing,
    Outcomes,
    Cancelling,
    ReportingCancels,
    Retrying,
    Finding,
    Customers,
    Numbers,
    Explaining,
    Configuring,
    Pruning,
    Purging,
    AccessKeys,
    Glancing,
    Upcoming,
    Watching,
    Epochs,
):
    """Every store."""


class DurableStoreConformance(StoreConformance, Durability):
    """A store that outlives its process and serves several; it provides `open_again` too."""
