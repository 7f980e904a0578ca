"""The queue over HTTP: the methods and values of `Queue`, for programs on other machines.

An operation is written once, as a generator that performs no I/O. The decorator `client_method`
makes it a method of both clients: `Client` blocks, `AsyncClient` is awaited (decision 0024).

    sync_client, async_client   the two clients: what each adds to the operations
    documents, administration   the operations
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
