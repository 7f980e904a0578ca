"""The suite that every store must pass, for the stores here and for those of other authors.

    from fairturn.stores.conformance import OpenStore, StoreConformance

    class TestMyStore(StoreConformance):
        @pytest.fixture
        def open_store(self, tmp_path: Path) -> OpenStore:
            ...

It needs pytest, which `pip install fairturn[dev]` brings.
"""

import pytest

# Before they are imported: pytest explains a failed `assert` only in modules that it reads itself.
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
        )
    )
)

from fairturn.stores.conformance.conformance import (  # noqa: E402
    DurableStoreConformance,
    StoreConformance,
)
from fairturn.stores.conformance.steps import Snapshot, snapshot  # noqa: E402
from fairturn.stores.conformance.suite import OpenAgain, OpenStore  # noqa: E402
from fairturn.stores.conformance.vectors import (  # noqa: E402
    Arrival,
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
    "Arrival",
    "read_priority_cases",
    "read_order_cases",
    "Snapshot",
    "snapshot",
]
