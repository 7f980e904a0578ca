"""Object storage for tests: moto's S3 server in a separate process."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import httpx

from tests.servers.lifetime import free_port, kept_folder, run_server
from tests.wait import wait_until


class Objects:
    """A server with one empty bucket."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.bucket = "documents"

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment variables with the endpoint and credentials for AWS programs."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "somebody",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "eu-central-1",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    @cached_property
    def client(self) -> Any:
        """Return a client of the bucket, to inspect or damage its objects."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="eu-central-1",
            aws_access_key_id="somebody",
            aws_secret_access_key="secret",
        )

    def clear(self) -> None:
        """Replace the bucket by a new one."""
        httpx.post(f"{self.endpoint}/moto-api/reset", timeout=30).raise_for_status()
        place = {"LocationConstraint": "eu-central-1"}
        self.client.create_bucket(Bucket=self.bucket, CreateBucketConfiguration=place)


@contextmanager
def started() -> Iterator[Objects]:
    """Run the server until the end of the block."""
    port = free_port()
    objects = Objects(f"http://127.0.0.1:{port}")
    with kept_folder("objects") as folder:
        process = run_server(
            folder, [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        )
        try:
            wait_until(lambda: _answers(objects.endpoint), "moto's server answers")
            yield objects
        finally:
            process.kill()
            process.wait()


def _answers(endpoint: str) -> bool:
    try:
        return httpx.get(f"{endpoint}/moto-api/", timeout=5).status_code == 200
    except httpx.TransportError:
        return False
