"""The test suite that every store must pass, also for stores outside this package.

    from fairturn.stores.conformance import OpenStore, StoreConformance

    class TestMyStore(StoreConformance):
        @pytest.fixture
        def open_store(self, tmp_path: Path) -> OpenStore:
            ...

It needs pytest, which is in the extra `fairturn[dev]`.
"""

import pytest

# Must run before the imports: pytest rewrites `assert` only in modules registered by then.
pytest.register_assert_rewrite(
    *(
        f"fairturn.stores.conformance.{module}"
        for module in (
            "steps",
            "submit",
            "limits",
            "claim",
            "order",
            "leases",
            "outcomes",
            "cancel",
            "query",
            "explanations",
            "settings",
            "retention",
            "changes",
            "durability",
            "epochs",
            "kinds",
            "pipelines",
            "expiry",
            "outages",
        )
    )
)

from fairturn.stores.conformance.conformance import (  # noqa: E402
    DurableStoreConformance,
    StoreConformance,
)
from fairturn.stores.conformance.steps import StoreDump, snapshot  # noqa: E402
from fairturn.stores.conformance.suite import OpenAgain, OpenStore  # noqa: E402
from fairturn.stores.conformance.vectors import (  # noqa: E402
    ArrivalVector,
    OrderCase,
    PriorityCase,
    read_order_cases,
    read_priority_cases,
)

__all__ = [
    "StoreConformance",
    "DurableStoreConformance",
    "OpenStore",
    "OpenAgain",
    "PriorityCase",
    "OrderCase",
    "ArrivalVector",
    "read_priority_cases",
    "read_order_cases",
    "StoreDump",
    "snapshot",
]
