"""A pipeline: the text of a document, OCR by a service where a scan has none, and delivery.

    fairturn config set kinds=open                        # submissions create kinds
    fairturn submit acme letter.pdf --kind text           # in this folder
    fairturn submit acme scan.pdf --kind text --expires-in 2h
    python ocr_service.py &                               # or later: the scan waits for it
    fairturn work pipeline:handlers --until-empty

OCR_URL is the URL of another OCR service, and DELIVERED the folder for the texts; pass them to the
handlers with --pass-env.
"""

import json
import os
import re
import urllib.error
import urllib.request
from pathlib import Path

from fairturn import ClaimedDocument, Handlers, Later, Next, Unavailable

OCR_URL = os.environ.get("OCR_URL", "http://127.0.0.1:8752/recognise")
DELIVERED = Path(os.environ.get("DELIVERED", "delivered"))

handlers = Handlers()


@handlers("text")
def text(document: ClaimedDocument) -> Next:
    """Extract the text of each page. The same document goes to OCR if no page has any."""
    pages = text_of_pages(document.read())
    if not any(pages):
        return Next("ocr", cost=len(pages))
    return Next("export", {"pages": pages})


@handlers("ocr", concurrency=1, time_limit_s=600, needs={"ocr-service"})
def ocr(document: ClaimedDocument) -> Next:
    """Recognise the text of a scan. While the service is down, the kind waits for it."""
    request = urllib.request.Request(OCR_URL, data=document.read())
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            pages = json.load(response)["pages"]
    except urllib.error.HTTPError as error:
        if error.code != 503:
            raise  # an error of this document, which uses an attempt
        raise Unavailable(str(error), retry_after_s=5, service="ocr-service") from None
    except OSError as error:  # refused, reset or timed out
        raise Unavailable(str(error), retry_after_s=5, service="ocr-service") from None
    return Next("export", {"pages": pages})


@handlers("export")
def export(document: ClaimedDocument) -> dict[str, int]:
    """Write the text to a file that is named after the document, so that a repeated attempt writes
    the same file."""
    folder = DELIVERED / document.customer
    if (folder / "closed").exists():
        raise Later(after_s=3_600)
    folder.mkdir(parents=True, exist_ok=True)
    pages = document.previous["pages"]
    (folder / f"{document.id}.txt").write_text("\n\n".join(pages))
    return {"pages": len(pages), "steps": document.step + 1}


def text_of_pages(pdf: bytes) -> list[str]:
    """Return the text of each page of a PDF whose streams are not compressed, as in this folder. A
    real pipeline calls a library here."""
    streams = re.findall(rb"stream\r?\n(.*?)endstream", pdf, re.DOTALL)
    return [
        " ".join(piece.decode("latin-1") for piece in re.findall(rb"\((.*?)\) Tj", stream))
        for stream in streams
    ]
