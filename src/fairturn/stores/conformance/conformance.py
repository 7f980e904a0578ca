"""The contract of `fairturn.stores.contract` as one class of tests.

The tests of a store inherit from one of these two classes and provide the fixture `open_store`. The
name of each test states a promise.
"""

from fairturn.stores.conformance.access_keys import AccessKeyPromises, OverviewPromises
from fairturn.stores.conformance.cancel import CancelPromises, CancelReportPromises, RetryPromises
from fairturn.stores.conformance.changes import ChangePromises
from fairturn.stores.conformance.claim import ClaimPromises, TurnPromises
from fairturn.stores.conformance.durability import DurabilityPromises
from fairturn.stores.conformance.epochs import EpochPromises
from fairturn.stores.conformance.expiry import ExpiryPromises, SnoozePromises
from fairturn.stores.conformance.explanations import ExplanationPromises
from fairturn.stores.conformance.kinds import KindPromises
from fairturn.stores.conformance.lanes import LanePromises
from fairturn.stores.conformance.leases import LeasePromises, RenewalPromises
from fairturn.stores.conformance.limits import DueTimePromises, LimitPromises
from fairturn.stores.conformance.order import OrderPromises
from fairturn.stores.conformance.outages import DurableOutagePromises, OutagePromises
from fairturn.stores.conformance.outcomes import OutcomePromises
from fairturn.stores.conformance.pipelines import (
    AttemptPromises,
    CheckpointPromises,
    PipelinePromises,
)
from fairturn.stores.conformance.progress import ProgressPromises
from fairturn.stores.conformance.query import CustomerPromises, QueryPromises, SummaryPromises
from fairturn.stores.conformance.quotas import QuotaPromises
from fairturn.stores.conformance.retention import PrunePromises, PurgePromises
from fairturn.stores.conformance.settings import SettingsPromises
from fairturn.stores.conformance.submit import SubmitPromises


class StoreConformance(
    SubmitPromises,
    LimitPromises,
    QuotaPromises,
    DueTimePromises,
    OrderPromises,
    ClaimPromises,
    TurnPromises,
    LeasePromises,
    RenewalPromises,
    ProgressPromises,
    OutcomePromises,
    CancelPromises,
    CancelReportPromises,
    RetryPromises,
    QueryPromises,
    CustomerPromises,
    SummaryPromises,
    ExplanationPromises,
    SettingsPromises,
    PrunePromises,
    PurgePromises,
    AccessKeyPromises,
    OverviewPromises,
    LanePromises,
    ChangePromises,
    EpochPromises,
    KindPromises,
    PipelinePromises,
    AttemptPromises,
    CheckpointPromises,
    SnoozePromises,
    ExpiryPromises,
    OutagePromises,
):
    """The promises of every store."""


class DurableStoreConformance(StoreConformance, DurabilityPromises, DurableOutagePromises):
    """Also the promises of a store that several processes share. Needs the fixture `open_again`."""
