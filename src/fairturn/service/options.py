"""Limits and options of a service process."""

import os
from dataclasses import dataclass

from fairturn.model import CONTENT_BYTES_MAX

BATCHES_AT_ONCE = 2  # each holds its documents in memory while they are stored
PARTS_MAX = 16  # of a multipart body
STREAMS_MAX = 2_000  # of events
POLLS_MAX = 1_000  # long polls; with STREAMS_MAX below the connections of a server
BULK_MAX = 100_000  # documents per request
HEAD_BYTES_MAX = 16_384  # of a request: target and headers
VALUES_MAX = 1_000_000  # in one line of a batch; a value takes up to 70 bytes of memory
CORES = os.cpu_count() or 1  # contents verified and names searched at the same time
KNOWN_KEYS_MAX = 10_000  # keys that were valid lately
VERIFIED_MAX = 10_000  # entries in the cache of verified files
REFUSED_PER_MINUTE = 60  # unknown keys per client address, before they get 429 instead of 401
LOGINS_PER_MINUTE = 30  # per key
SESSIONS_PER_KEY_MAX = 100  # of the page; the oldest ends
RATE = "6000/minute"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLimits:
    """The limits of one process. An address is an IPv4 address or an IPv6 network of 64 bits."""

    size_bytes_max: int = CONTENT_BYTES_MAX
    upload_s_max: float = 1_800.0  # less than the retention of contents without a document
    headers_s_max: float = 30.0  # from the connection or the first byte of a request
    pause_s_max: float = 30.0  # between two chunks of an upload
    body_s_max: float = 30.0  # for the whole body of other requests
    uploads_per_key_max: int = 32
    streams_per_key_max: int = 200  # of events: one client must not exhaust STREAMS_MAX
    polls_per_key_max: int = 100  # long polls
    downloads_per_key_max: int = 16
    requests_per_key_max: int = 4  # in progress, other than the above and submissions
    requests_waiting_per_key_max: int = 200  # for one of the `requests_per_key_max` to end
    connections_per_address_max: int = 1_000  # also requests in progress, behind a trusted proxy
    anonymous_per_minute: int = 300  # requests without a key or a session, per address
    rate: str = RATE  # per key, in the notation of the package `limits`
    show_positions: bool = True  # to customers
    customers_in_metrics: int = 0  # customers with metrics of their own
