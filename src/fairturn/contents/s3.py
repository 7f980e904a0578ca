"""Contents in S3, or another object storage with its API.

Credentials and endpoint are configured as for the AWS tools: `AWS_ACCESS_KEY_ID`, `AWS_PROFILE`,
`AWS_ENDPOINT_URL`, the role of the machine. Large contents are multipart uploads, visible once they
are complete; the sweep aborts uploads that a crash interrupted.
"""

import hashlib
import os
import re
import secrets
import shutil
from base64 import b64encode
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from tempfile import TemporaryFile
from typing import Any, BinaryIO

from fairturn.clock import from_datetime
from fairturn.contents.local import (
    CHUNK_BYTES,
    UNFINISHED,
    Contents,
    Verify,
    checked_name,
    verify_all,
)
from fairturn.errors import ContentDamaged, StoreError, StoreFull, StoreRefused, StoreUnavailable
from fairturn.model import CONTENT_BYTES_MAX, ContentRef
from fairturn.stores import crash

PART_BYTES = 8 * 1_048_576  # S3 allows 10,000 parts, each but the last of at least 5 MiB
CONNECT_S, ANSWER_S = 10, 60
ATTEMPTS = 5
CONNECTIONS = 50  # more than the threads of the service
LOCATED_S = 7 * 86_400  # lifetime of a presigned URL, the maximum of S3
DELETED_AT_ONCE = 1_000

_URL = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(.*))?", re.ASCII)
_MISSING = ("NoSuchKey", "404", "NotFound")
_TRANSIENT = (429, 500, 502, 503, 504)


def is_bucket(place: str) -> bool:
    return place.startswith("s3://")


class Bucket(Contents):
    """Contents as objects under one prefix of a bucket."""

    def __init__(self, url: str) -> None:
        match = _URL.fullmatch(url)
        if match is None:
            raise ValueError(
                f"{url!r} is not a bucket; write it as s3://BUCKET or s3://BUCKET/PATH"
            )
        self.url = url
        self._bucket = match[1]
        prefix = (match[2] or "").strip("/")
        self._prefix = f"{prefix}/" if prefix else ""
        self._client = _connect()

    def begin(self, *, size_bytes_max: int = CONTENT_BYTES_MAX) -> "_ObjectWriter":
        crash.point("content-before-write")
        return _ObjectWriter(self, secrets.token_hex(16), size_bytes_max)

    def open(self, ref: ContentRef, verify: Verify | None = None) -> BinaryIO:
        key = self._key(ref.name)
        file = TemporaryFile()  # noqa: SIM115 - the caller closes it
        try:
            with self._translated("read"), _on_disk():
                response = self._client.get_object(Bucket=self._bucket, Key=key)
                with response["Body"] as body:
                    shutil.copyfileobj(body, file, CHUNK_BYTES)
                file.seek(0)
                (verify or verify_all)(file, ref)
                file.seek(0)
        except BaseException:
            file.close()
            raise
        return file

    def locate(self, name: str) -> str:
        where = {"Bucket": self._bucket, "Key": self._key(name)}
        with self._translated("locate"):
            url: str = self._client.generate_presigned_url(
                "get_object", Params=where, ExpiresIn=LOCATED_S
            )
        return url

    def check(self) -> None:
        with self._translated("use"):
            self._client.head_bucket(Bucket=self._bucket)

    def delete(self, names: Iterable[str]) -> None:
        whole: list[str] = []
        for name in names:
            if name.endswith(UNFINISHED):
                self._abort(name.removesuffix(UNFINISHED))
                continue
            whole.append(self._key(name))
            if len(whole) == DELETED_AT_ONCE:
                self._delete(whole)
                whole = []
        if whole:
            self._delete(whole)

    def names(self, older_than: int) -> Iterator[str]:
        with self._translated("list"):
            pages = self._client.get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix):
                for found in page.get("Contents", ()):
                    name = self._name_in(found["Key"])
                    if name is not None and from_datetime(found["LastModified"]) < older_than:
                        yield name
            for upload in self._uploads(self._prefix):
                name = self._name_in(upload["Key"])
                if name is not None and from_datetime(upload["Initiated"]) < older_than:
                    yield name + UNFINISHED

    def close(self) -> None:
        self._client.close()

    def _key(self, name: str) -> str:
        return self._prefix + checked_name(name)

    def _name_in(self, key: str) -> str | None:
        """Return the name of a stored file; None if the key is not that of one."""
        name = key.removeprefix(self._prefix)
        try:
            return checked_name(name)
        except ValueError:
            return None

    def _delete(self, keys: list[str]) -> None:
        wanted = {"Objects": [{"Key": key} for key in keys], "Quiet": True}
        with self._translated("delete"):
            response = self._client.delete_objects(Bucket=self._bucket, Delete=wanted)
        failed = [each for each in response.get("Errors", ()) if each.get("Code") not in _MISSING]
        if failed:
            raise StoreError(
                f"{self.url}: cannot delete {len(failed)} of {len(keys)} contents, "
                f"such as {failed[0].get('Key')}: {failed[0].get('Code')}"
            )

    def _abort(self, name: str) -> None:
        """Abort the multipart uploads of a stored file."""
        key = self._key(name)
        with self._translated("delete"):
            for upload in list(self._uploads(key)):
                if upload["Key"] == key:
                    self._client.abort_multipart_upload(
                        Bucket=self._bucket, Key=key, UploadId=upload["UploadId"]
                    )

    def _uploads(self, prefix: str) -> Iterator[Any]:
        pages = self._client.get_paginator("list_multipart_uploads")
        for page in pages.paginate(Bucket=self._bucket, Prefix=prefix):
            yield from page.get("Uploads", ())

    @contextmanager
    def _translated(self, verb: str) -> Iterator[None]:
        """Convert errors of botocore to ours."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except ClientError as error:
            raise self._translate(verb, error.response) from error
        except BotoCoreError as error:
            raise StoreUnavailable(f"{self.url}: cannot {verb} content: {error}") from error

    def _translate(self, verb: str, response: Any) -> StoreError | ContentDamaged:
        code = str(response.get("Error", {}).get("Code", ""))
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        message = f"{self.url}: cannot {verb} content: {code or status}"
        if verb == "read" and code in _MISSING:
            return ContentDamaged(f"the content is missing in {self.url}")
        if status == 507:
            return StoreFull(f"{self.url} is full; nothing was stored by this call")
        return StoreUnavailable(message) if status in _TRANSIENT else StoreError(message)


class _ObjectWriter:
    """Writes an object. A part is buffered on disk until it is complete, so that a thousand slow
    uploads do not fill the memory."""

    def __init__(self, owner: Bucket, name: str, size_bytes_max: int) -> None:
        self._owner = owner
        self._name = name
        self._where = {"Bucket": owner._bucket, "Key": owner._key(name)}
        self._size_bytes_max = size_bytes_max
        self._size_bytes = 0
        self._digest = hashlib.sha256()
        self._part = TemporaryFile()  # noqa: SIM115 - closed by finish and abandon
        self._part_bytes = 0
        self._part_digest = _md5()
        self._upload: str | None = None  # from the second part on
        self._sent: list[dict[str, Any]] = []

    def write(self, chunk: bytes) -> None:
        self._size_bytes += len(chunk)
        if self._size_bytes > self._size_bytes_max:
            raise ValueError(f"the content has more than {self._size_bytes_max:,} bytes, the limit")
        self._digest.update(chunk)
        rest = memoryview(chunk)
        while rest:
            if self._part_bytes == PART_BYTES:
                self._send_part()
            piece = rest[: PART_BYTES - self._part_bytes]
            with _on_disk():
                self._part.write(piece)
            self._part_digest.update(piece)
            self._part_bytes += len(piece)
            rest = rest[len(piece) :]

    def finish(self) -> ContentRef:
        client = self._owner._client
        with self._owner._translated("write"):
            crash.point("content-before-rename")
            if self._upload is None:
                client.put_object(**self._where, **self._body())
            else:
                self._send_part()
                client.complete_multipart_upload(
                    **self._where, UploadId=self._upload, MultipartUpload={"Parts": self._sent}
                )
                self._upload = None
        self._part.close()
        crash.point("content-after-rename")
        return ContentRef(self._name, self._size_bytes, self._digest.digest())

    def abandon(self) -> None:
        self._part.close()
        upload, self._upload = self._upload, None
        if upload is not None:
            with suppress(StoreError), self._owner._translated("delete"):
                self._owner._client.abort_multipart_upload(**self._where, UploadId=upload)

    def _send_part(self) -> None:
        client = self._owner._client
        with self._owner._translated("write"):
            if self._upload is None:
                self._upload = client.create_multipart_upload(**self._where)["UploadId"]
            number = len(self._sent) + 1
            sent = client.upload_part(
                **self._where, UploadId=self._upload, PartNumber=number, **self._body()
            )
        self._sent.append({"PartNumber": number, "ETag": sent["ETag"]})
        self._part.seek(0)
        self._part.truncate()
        self._part_bytes, self._part_digest = 0, _md5()

    def _body(self) -> dict[str, Any]:
        """Return the buffered part with its MD5, which all S3 servers verify."""
        self._part.seek(0)
        return {
            "Body": self._part,
            "ContentLength": self._part_bytes,
            "ContentMD5": b64encode(self._part_digest.digest()).decode(),
        }


@contextmanager
def _on_disk() -> Iterator[None]:
    """Convert temporary-file errors to `StoreFull`."""
    try:
        yield
    except OSError as error:
        raise StoreFull(f"a temporary file cannot be written: {error.strerror or error}") from error


def fetch(url: str, path: str) -> None:
    """Download the URL that `Bucket.locate` returned to a file, without verifying it."""
    import ssl
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import urlopen

    trusted = ssl.create_default_context(cafile=os.environ.get("AWS_CA_BUNDLE") or None)
    try:
        with urlopen(url, timeout=ANSWER_S, context=trusted) as response, _new(path) as file:
            shutil.copyfileobj(response, file, CHUNK_BYTES)
    # No message contains the URL, which grants access to the content.
    except HTTPError as error:
        if error.code == 404:
            raise ContentDamaged("the content is missing in its bucket") from None
        raise StoreUnavailable(f"the content cannot be fetched: HTTP {error.code}") from None
    except (OSError, HTTPException) as error:
        raise StoreUnavailable(f"the content cannot be fetched: {type(error).__name__}") from None


def _new(path: str) -> BinaryIO:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    return os.fdopen(os.open(path, flags, 0o600), "wb")


def _md5() -> Any:
    return hashlib.md5(usedforsecurity=False)


def _connect() -> Any:
    """Return a thread-safe client."""
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError as error:
        raise StoreRefused(
            "contents in a bucket need boto3; install it with: pip install 'fairturn[s3]'"
        ) from error
    settings = {
        "connect_timeout": CONNECT_S,
        "read_timeout": ANSWER_S,
        "max_pool_connections": CONNECTIONS,
        "retries": {"mode": "standard", "max_attempts": ATTEMPTS},
        "signature_version": "s3v4",
        # Not every server supports the newer checksums; each part has an MD5.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
    }
    try:
        session = boto3.session.Session()
        client = session.client("s3", config=Config(**settings))
        if ".amazonaws.com" in client.meta.endpoint_url:
            return client
        # Other servers seldom support a host name for each bucket.
        by_path = Config(**settings, s3={"addressing_style": "path"})
        return session.client("s3", config=by_path)
    except BotoCoreError as error:
        raise StoreRefused(f"contents in a bucket cannot be used: {error}") from error
