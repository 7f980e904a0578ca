"""The suite that every store must pass, for the stores here and for those of other authors.

    from fairturn.testing import OpenStore, StoreConformance

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
        f"fairturn.testing.{module}"
        for module in (
            "steps",
            "submitting",
            "limits",
            "claiming",
            "order",
            "leases",
            "outcomes",
            "cancelling",
            "reading",
            "explaining",
            "configuring",
            "forgetting",
            "watching",
            "durability",
            "epochs",
        )
    )
)

from fairturn.testing.conformance import (  # noqa: E402
    DurableStoreConformance,
    StoreConformance,
)
from fairturn.testing.steps import Snapshot, snapshot  # noqa: E402
from fairturn.testing.suite import OpenAgain, OpenStore  # noqa: E402
from fairturn.testing.vectors import (  # noqa: E402
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
