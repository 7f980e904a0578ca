"""Receiving request bodies: small ones in memory, larger ones streamed to the contents.

No thread waits for the network: the event loop collects a piece, and a thread writes it. Limits
apply to the bytes received, not to `Content-Length`.
"""

import asyncio
import base64
import binascii
import hashlib
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from tempfile import TemporaryFile
from typing import BinaryIO, NamedTuple

from fastapi import Request
from starlette.requests import ClientDisconnect

from fairturn.clock import stopwatch
from fairturn.contents.local import ContentWriter
from fairturn.errors import QuotaExceeded, StoreRefused
from fairturn.model import DOCUMENT_BYTES, INLINE_BYTES_MAX, ContentRef
from fairturn.service.problems import Problem, ProblemCode
from fairturn.service.service import Service

PIECE_BYTES = 262_144  # of each upload in memory
_DIGEST = re.compile(r"sha-256=:([A-Za-z0-9+/=]{1,64}):")

Received = bytes | ContentRef


class UploadBody:
    """The body of one document while it is received."""

    def __init__(self, service: Service, size_bytes_max: int) -> None:
        self._service = service
        self._size_bytes_max = size_bytes_max
        self._held = bytearray()
        self._writing: ContentWriter | None = None
        self._size_bytes = 0

    async def add(self, chunk: bytes) -> None:
        maximum = self._size_bytes_max
        self._size_bytes += len(chunk)
        if self._size_bytes > maximum:
            raise TooLarge(maximum)
        self._held += chunk
        if self._writing is None and self._size_bytes > INLINE_BYTES_MAX:
            begin = self._service.queue.contents.begin
            with refusing_without_a_place():
                self._writing = await self._service.move(lambda: begin(size_bytes_max=maximum))
        if self._writing is not None and len(self._held) >= PIECE_BYTES:
            await self._write()

    async def whole(self) -> Received:
        """Return the bytes, or a reference to them once they are durable."""
        if self._writing is None:
            return bytes(self._held)
        await self._write()
        return await self._service.move(self._writing.finish)

    async def abandon(self) -> None:
        """Delete an unfinished content."""
        if self._writing is not None:
            # Shielded: a cancelled request must not leave a partial file behind.
            await asyncio.shield(self._service.move(self._writing.abandon))

    async def _write(self) -> None:
        assert self._writing is not None
        piece, self._held = bytes(self._held), bytearray()
        await self._service.move(self._writing.write, piece)


@contextmanager
def refusing_without_a_place() -> Iterator[None]:
    """Convert `StoreRefused`, raised without a place for contents, to `TOO_LARGE`."""
    try:
        yield
    except StoreRefused:
        raise TooLarge(INLINE_BYTES_MAX) from None


class TooLarge(Problem):
    def __init__(self, maximum: int) -> None:
        super().__init__(ProblemCode.TOO_LARGE, f"the body has more than {maximum:,} bytes")
        self.maximum = maximum


class UploadLimit(NamedTuple):
    """The maximum size of an upload: that of the service, or what the customer's quota leaves."""

    size_bytes_max: int
    exceeded: QuotaExceeded | None = None  # if the limit is that of the quota

    @contextmanager
    def enforced(self) -> Iterator[None]:
        """Raise `QuotaExceeded` if an upload is stopped at the quota."""
        try:
            yield
        except TooLarge as error:
            if self.exceeded is None or error.maximum < self.size_bytes_max:
                raise
            raise self.exceeded from None


async def upload_limit(service: Service, customer: str | None, *, has_key: bool) -> UploadLimit:
    """Return how large an upload may be.

    With an idempotency key the document may be stored already, and repeating its submission must
    succeed. The limit is then the whole quota, and the store checks it after the upload.
    """
    size_bytes_max = service.plan.size_bytes_max
    if customer is not None:
        stored_bytes, bytes_max = await service.run(_quota_of, service, customer)
        left_bytes = bytes_max if has_key else max(0, bytes_max - stored_bytes - DOCUMENT_BYTES)
        if left_bytes < size_bytes_max:
            exceeded = QuotaExceeded(
                customer=customer, stored_bytes=stored_bytes, bytes_max=bytes_max
            )
            return UploadLimit(left_bytes, exceeded)
    return UploadLimit(size_bytes_max)


def _quota_of(service: Service, customer: str) -> tuple[int, int]:
    """Return the bytes of the customer's stored documents, and how many they may have."""
    bytes_max = service.queue.settings.bytes_per_customer_max
    for known in service.queue.queries.customers(names=[customer]).customers:
        return known.stored_bytes, known.settings.bytes_max or bytes_max
    return 0, bytes_max


async def pieces_of(request: Request, service: Service, maximum: int) -> AsyncIterator[bytes]:
    """Yield the body of a request. Raises `Problem` if it is too large, too slow or cut off."""
    _refuse_declared(request, maximum)
    plan = service.plan
    until = stopwatch() + plan.upload_s_max
    size_bytes = 0
    stream = aiter(request.stream())
    while True:
        left_s = min(plan.pause_s_max, until - stopwatch())
        try:
            async with asyncio.timeout(left_s):
                chunk = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise _too_slow(service) from None
        except ClientDisconnect:
            raise Problem(ProblemCode.CUT_OFF) from None
        size_bytes += len(chunk)
        if size_bytes > maximum:
            raise TooLarge(maximum)
        if chunk:
            yield chunk


def _too_slow(service: Service) -> Problem:
    plan = service.plan
    return Problem(
        ProblemCode.TOO_SLOW,
        f"the limits are {plan.pause_s_max:g} s between two chunks, {plan.upload_s_max:g} s in all",
    )


def is_small(request: Request, service: Service) -> bool:
    """Return whether the declared size is allowed and fits into a row. The server enforces
    `Content-Length`."""
    declared = request.headers.get("content-length", "")
    maximum = min(INLINE_BYTES_MAX, service.plan.size_bytes_max)
    return declared.isdecimal() and len(declared) < 10 and int(declared) <= maximum


async def receive_small(request: Request, service: Service) -> bytes:
    """Return a body for which `is_small` holds; it usually arrived with its headers."""
    try:
        async with asyncio.timeout(service.plan.pause_s_max):
            return await request.body()
    except TimeoutError:
        raise _too_slow(service) from None
    except ClientDisconnect:
        raise Problem(ProblemCode.CUT_OFF) from None


def _refuse_declared(request: Request, maximum: int) -> None:
    """Reject a body by its declared size, before reading it."""
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared[:20]) > maximum:
        raise TooLarge(maximum)


async def receive(request: Request, service: Service, maximum: int) -> Received:
    """Receive a raw body as the content of a document."""
    body = UploadBody(service, maximum)
    try:
        async for chunk in pieces_of(request, service, maximum):
            await body.add(chunk)
        return await body.whole()
    finally:
        await body.abandon()


async def receive_in_memory(request: Request, service: Service, maximum: int) -> bytes:
    held = bytearray()
    async for chunk in pieces_of(request, service, maximum):
        held += chunk
    return bytes(held)


async def receive_to_disk(request: Request, service: Service, maximum: int) -> BinaryIO:
    """Receive a body into a temporary file, which the caller closes."""
    file: BinaryIO = await service.move(TemporaryFile)
    try:
        held = bytearray()
        async for chunk in pieces_of(request, service, maximum):
            held += chunk
            if len(held) >= PIECE_BYTES:
                piece, held = bytes(held), bytearray()
                await service.move(file.write, piece)
        await service.move(file.write, bytes(held))
    except BaseException:
        file.close()
        raise
    return file


def check_checksum(received: Received, sha256: str | None, header: str | None) -> None:
    """Compare with the SHA-256 of the query or of `Content-Digest`. Raises `Problem`."""
    expected = []
    if sha256 is not None:
        expected.append(bytes.fromhex(sha256))
    if header is not None:
        expected.append(_digest_in(header))
    if not expected:
        return
    found = hashlib.sha256(received).digest() if isinstance(received, bytes) else received.sha256
    for digest in expected:
        if digest != found:
            raise Problem(
                ProblemCode.CHECKSUM_WRONG, f"the SHA-256 of the received body is {found.hex()}"
            )


def _digest_in(header: str) -> bytes:
    match = _DIGEST.search(header)
    try:
        if match is None:
            raise ValueError
        return base64.b64decode(match[1], validate=True)
    except (ValueError, binascii.Error):
        raise Problem(
            ProblemCode.INVALID, "Content-Digest must have the form sha-256=:BASE64: (RFC 9530)"
        ) from None
