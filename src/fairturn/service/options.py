"""What a process of the service was told: limits, addresses that are trusted, what is shown."""

from dataclasses import dataclass

from fairturn.model import CONTENT_BYTES_MAX

BATCHES_AT_ONCE = 2  # each is in memory as a whole, when all of it has come
PARTS_MAX = 16  # of a multipart body
STREAMS_MAX = 2_000  # of events
BULK_MAX = 100_000  # documents that one call changes
REFUSED_PER_MINUTE = 60  # keys that are not known, from one address
RATE = "6000/minute"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The limits of one process."""

    size_bytes_max: int = CONTENT_BYTES_MAX
    upload_s_max: float = 1_800.0  # less than contents without a document are kept
    headers_s_max: float = 30.0  # of a request, after it has begun or the connection was made
    pause_s_max: float = 30.0  # between two pieces of an upload
    body_s_max: float = 30.0  # for the whole body of a request that is no upload
    uploads_per_key_max: int = 32
    streams_per_key_max: int = 200  # of events: one page in a loop must leave some to others
    rate: str = RATE  # of each key, in the words of `limits`
    show_positions: bool = True  # to customers
    customers_in_metrics: int = 0  # so many at most have numbers of their own
