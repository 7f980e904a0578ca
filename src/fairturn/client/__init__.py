"""The queue over HTTP: the methods and values of `Queue`, for programs on other machines.

An operation is written once, as a generator that performs no I/O; `Client` and `AsyncClient` run it
with a blocking and an async transport (decision 0024).

    sync_client, async_client   the typed methods of the two clients
    operations                  what each method does
    upload                      submissions as requests
    request                     requests, streams, retries
    response                    responses, and the errors for them
    values                      JSON as the values of the queue
    transport                   the only module that uses httpx
"""

from fairturn.client.request import RetryPolicy
from fairturn.client.upload import ProgressCallback
from fairturn.client.values import Identity
from fairturn.model import CustomerSummary

__all__ = ["RetryPolicy", "ProgressCallback", "Identity", "CustomerSummary"]
