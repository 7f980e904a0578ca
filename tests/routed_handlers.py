"""Handlers of the real outage and of the real routing, for workers in processes of their own."""

import json
import os
import threading
import urllib.request

from fairturn import ClaimedDocument, Handlers, Unavailable

SERVICE_URL = os.environ.get("SERVICE_URL", "")
RETRY_AFTER_S = 1.0
WORK_S = 0.1

handlers = Handlers()


@handlers("recognised", needs={"recogniser"})
def recognised(document: ClaimedDocument) -> object:
    """Post the document to the service."""
    request = urllib.request.Request(SERVICE_URL, data=json.dumps(document.payload).encode())
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.load(response)
    except OSError as error:  # 503, too
        raise Unavailable(str(error), retry_after_s=RETRY_AFTER_S, service="recogniser") from None


@handlers("ocr")
@handlers("text")
def work(document: ClaimedDocument) -> None:
    """Take as long as each document of the routed workload."""
    threading.Event().wait(WORK_S)
