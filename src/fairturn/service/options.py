"""Limits and options of a service process."""

from dataclasses import dataclass

from fairturn.model import CONTENT_BYTES_MAX

BATCHES_AT_ONCE = 2  # each is in memory as a whole while it is stored
PARTS_MAX = 16  # of a multipart body
STREAMS_MAX = 2_000  # of events
BULK_MAX = 100_000  # documents per request
REFUSED_PER_MINUTE = 60  # unknown keys per client address
RATE = "6000/minute"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLimits:
    """The limits of one process."""

    size_bytes_max: int = CONTENT_BYTES_MAX
    upload_s_max: float = 1_800.0  # less than the retention of contents without a document
    headers_s_max: float = 30.0  # from the connection or the first byte of a request
    pause_s_max: float = 30.0  # between two chunks of an upload
    body_s_max: float = 30.0  # for the whole body of other requests
    uploads_per_key_max: int = 32
    streams_per_key_max: int = 200  # of events: one client must not exhaust STREAMS_MAX
    rate: str = RATE  # per key, in the notation of the package `limits`
    show_positions: bool = True  # to customers
    customers_in_metrics: int = 0  # customers with metrics of their own
