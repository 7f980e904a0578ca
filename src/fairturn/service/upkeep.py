"""Records expired documents while the service runs, also if no worker does."""

import logging

import anyio

from fairturn.errors import StoreError
from fairturn.model import EXPIRE_MAX
from fairturn.service.service import Service

EXPIRE_S = 1.0  # between two calls, unless more documents may have expired
_LOG = logging.getLogger("fairturn.service")


async def record_expired(service: Service) -> None:
    """Record expired documents about once a second, one call at a time, in a thread. An error must
    not stop the service: the next call records the same documents."""
    while not service.watch.closed:
        recorded = 0
        try:
            recorded = await service.run(service.queue.expire)
        except StoreError:
            pass  # claims and workers record them too
        except Exception:
            _LOG.exception("the service could not record expired documents")
        await anyio.sleep(0 if recorded == EXPIRE_MAX else EXPIRE_S)
