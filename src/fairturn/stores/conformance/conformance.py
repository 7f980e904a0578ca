"""The whole contract of `fairturn.stores.contract` as one class of tests.

An author of a store writes a class of tests that inherits from one of the two and provides the
fixture `open_store`; what each test promises is its name.
"""

from fairturn.stores.conformance.access_keys import AccessKeys, Glancing
from fairturn.stores.conformance.cancel import Cancelling, ReportingCancels, Retrying
from fairturn.stores.conformance.changes import Watching
from fairturn.stores.conformance.claim import Claiming, Turning
from fairturn.stores.conformance.durability import Durability
from fairturn.stores.conformance.epochs import Epochs
from fairturn.stores.conformance.explanations import Explaining
from fairturn.stores.conformance.lanes import Upcoming
from fairturn.stores.conformance.leases import Leases, Renewing
from fairturn.stores.conformance.limits import DueTimes, Limits
from fairturn.stores.conformance.order import Order
from fairturn.stores.conformance.outcomes import Outcomes
from fairturn.stores.conformance.progress import Progressing
from fairturn.stores.conformance.query import Customers, Finding, Numbers
from fairturn.stores.conformance.retention import Pruning, Purging
from fairturn.stores.conformance.settings import Configuring
from fairturn.stores.conformance.submit import Submitting


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
