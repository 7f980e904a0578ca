"""Bodies of requests as they come in: a small one in memory, a larger one to where contents lie.

No thread waits for the network: the event loop collects a piece, and a thread writes it. Limits are
on the bytes that come and not on what a header says. Nothing here looks into the bytes.
"""

import asyncio
import base64
import binascii
import hashlib
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from tempfile import TemporaryFile
from typing import BinaryIO

from fastapi import Request
from starlette.requests import ClientDisconnect

from fairturn.clock import stopwatch
from fairturn.contents.local import Writing
from fairturn.errors import StoreRefused
from fairturn.model import INLINE_BYTES_MAX, ContentRef
from fairturn.service.problems import Code, Problem
from fairturn.service.service import Service

PIECE_BYTES = 262_144  # so much of each upload is in memory at a time
_DIGEST = re.compile(r"sha-256=:([A-Za-z0-9+/=]{1,64}):")

Received = bytes | ContentRef


class Body:
    """The bytes of one document, while they come in."""

    def __init__(self, service: Service, size_bytes_max: int) -> None:
        self._service = service
        self._size_bytes_max = size_bytes_max
        self._held = bytearray()
        self._writing: Writing | None = None
        self._size_bytes = 0

    async def add(self, chunk: bytes) -> None:
        """Take the next bytes."""
        maximum = self._size_bytes_max
        self._size_bytes += len(chunk)
        if self._size_bytes > maximum:
            raise _too_large(maximum)
        self._held += chunk
        if self._writing is None and self._size_bytes > INLINE_BYTES_MAX:
            begin = self._service.queue.contents.begin
            with refusing_without_a_place():
                self._writing = await self._service.move(lambda: begin(size_bytes_max=maximum))
        if self._writing is not None and len(self._held) >= PIECE_BYTES:
            await self._write()

    async def whole(self) -> Received:
        """Everything: the bytes themselves, or where they lie, on stable storage."""
        if self._writing is None:
            return bytes(self._held)
        await self._write()
        return await self._service.move(self._writing.finish)

    async def abandon(self) -> None:
        """Keep nothing of what was not finished."""
        if self._writing is not None:
            # Also while the request is being cancelled: a file must not stay for want of a moment.
            await asyncio.shield(self._service.move(self._writing.abandon))

    async def _write(self) -> None:
        assert self._writing is not None
        piece, self._held = bytes(self._held), bytearray()
        await self._service.move(self._writing.write, piece)


@contextmanager
def refusing_without_a_place() -> Iterator[None]:
    """Where there is no place for contents, what does not fit into a row is too large."""
    try:
        yield
    except StoreRefused:
        raise _too_large(INLINE_BYTES_MAX) from None


def _too_large(maximum: int) -> Problem:
    return Problem(Code.TOO_LARGE, f"at most {maximum:,} bytes are accepted")


async def pieces_of(request: Request, service: Service, maximum: int) -> AsyncIterator[bytes]:
    """The body of a request, as long as it comes fast enough and is not too large."""
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
            raise Problem(Code.CUT_OFF) from None
        size_bytes += len(chunk)
        if size_bytes > maximum:
            raise _too_large(maximum)
        if chunk:
            yield chunk


def _too_slow(service: Service) -> Problem:
    plan = service.plan
    return Problem(
        Code.TOO_SLOW,
        f"a body may pause for {plan.pause_s_max:g} s and take {plan.upload_s_max:g} s",
    )


def is_small(request: Request) -> bool:
    """Whether a body says that it fits into a row. It cannot be larger than it says."""
    declared = request.headers.get("content-length", "")
    return declared.isdecimal() and len(declared) < 10 and int(declared) <= INLINE_BYTES_MAX


async def receive_small(request: Request, service: Service) -> bytes:
    """A body that says that it is small: as a rule it has come with its headers."""
    try:
        async with asyncio.timeout(service.plan.pause_s_max):
            return await request.body()
    except TimeoutError:
        raise _too_slow(service) from None
    except ClientDisconnect:
        raise Problem(Code.CUT_OFF) from None


def _refuse_declared(request: Request, maximum: int) -> None:
    """Refuse a body that says itself that it is too large, before any of it is read."""
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared[:20]) > maximum:
        raise _too_large(maximum)


async def receive(request: Request, service: Service) -> Received:
    """The raw body of a request as the content of a document."""
    maximum = service.plan.size_bytes_max
    body = Body(service, maximum)
    try:
        async for chunk in pieces_of(request, service, maximum):
            await body.add(chunk)
        return await body.whole()
    finally:
        await body.abandon()


async def receive_in_memory(request: Request, service: Service, maximum: int) -> bytes:
    """A body that is small enough to be held as a whole."""
    held = bytearray()
    async for chunk in pieces_of(request, service, maximum):
        held += chunk
    return bytes(held)


async def receive_to_disk(request: Request, service: Service, maximum: int) -> BinaryIO:
    """A body that is read when all of it has come; who calls this closes the file."""
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


@contextmanager
def one_of_its_uploads(service: Service, key: str | None) -> Iterator[None]:
    """Counts the uploads of a key that are under way, and refuses one too many."""
    who, uploads = key or "", service.uploads
    if uploads.get(who, 0) >= service.plan.uploads_per_key_max:
        raise Problem(Code.TOO_MANY_AT_ONCE, retry_after_s=1)
    uploads[who] = uploads.get(who, 0) + 1
    try:
        yield
    finally:
        uploads[who] -= 1
        if not uploads[who]:
            del uploads[who]


def check_checksum(received: Received, sha256: str | None, header: str | None) -> None:
    """Compare with the SHA-256 that the sender named, in the query or by `Content-Digest`."""
    wanted = []
    if sha256 is not None:
        wanted.append(bytes.fromhex(sha256))
    if header is not None:
        wanted.append(_digest_in(header))
    if not wanted:
        return
    found = hashlib.sha256(received).digest() if isinstance(received, bytes) else received.sha256
    for digest in wanted:
        if digest != found:
            raise Problem(Code.CHECKSUM_WRONG, f"the SHA-256 of what came in is {found.hex()}")


def _digest_in(header: str) -> bytes:
    match = _DIGEST.search(header)
    try:
        if match is None:
            raise ValueError
        return base64.b64decode(match[1], validate=True)
    except (ValueError, binascii.Error):
        raise Problem(
            Code.INVALID, "Content-Digest must have the form sha-256=:BASE64: (RFC 9530)"
        ) from None
