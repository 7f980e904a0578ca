"""`serve`, `up` and `keys`: the service from the command line."""

import errno
import json
import os
import re
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from ipaddress import ip_address
from pathlib import Path

import httpx
import pytest

from fairturn import Queue
from tests.commands import SCRIPT, error_of, fairturn, lines_of
from tests.http_server import bearer
from tests.servers import objects
from tests.servers.queues import Databases
from tests.wait import wait_until


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Program:
    """The running program."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.said: list[str] = []
        self.url = ""
        self.token: str | None = None  # while there are no keys
        assert process.stderr is not None
        while not self.url:
            line = process.stderr.readline()
            assert line, f"it ended: {self.said}"
            self.said.append(line)
            match = re.search(r"Serving at ([^\s/]+//[^\s/]+)(?:/login\?token=(\w+))?", line)
            self.url, self.token = (match[1], match[2]) if match else ("", None)

    @property
    def headers(self) -> dict[str, str]:
        """The token as an API client sends it."""
        assert self.token is not None, self.said
        return bearer(self.token)

    def end(self) -> int:
        """Stop it cleanly; the rest of its output is in `said`."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.stderr is not None
        self.said += self.process.stderr.readlines()  # `communicate` would lose buffered output
        return self.process.wait(30)


@contextmanager
def running(*arguments: str, **environment: str) -> Iterator[Program]:
    with subprocess.Popen(
        [SCRIPT, *arguments],
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Program(process)
        finally:
            process.kill()


def test_up_serves_and_works_and_ends_well_with_sigterm(folder: Path) -> None:
    (folder / "invoices.py").write_text("def extract(document):\n    return {'pages': 3}\n")
    with running("up", "invoices:extract", "--port", "0", "--json") as program:
        with httpx.Client(base_url=program.url, headers=program.headers, timeout=30) as client:
            id = client.post("/v1/documents?customer=acme", content=b"x").json()["id"]
            done = client.get(f"/v1/documents/{id}", params={"wait_s": 30}).json()
            result = client.get(f"/v1/documents/{id}/result").json()
        with httpx.stream(
            "GET", f"{program.url}/v1/events", headers=program.headers, timeout=30
        ) as events:
            next(events.iter_lines())
            code = program.end()

    assert (done["state"], result) == ("completed", {"pages": 3})
    assert code == 0
    said = [json.loads(line) for line in program.said]
    assert ("POST", "/v1/documents", 201) in [
        (line["method"], line["route"], line["status"])
        for line in said
        if line["event"] == "served"
    ]
    assert any("no access keys" in line.get("message", "") for line in said)
    with Queue("documents.db") as queue:
        assert queue.summary().running == 0


@pytest.mark.parametrize("contents", ["shared", "s3://documents/invoices"])
def test_over_postgresql_the_service_and_the_workers_are_processes_apart(
    folder: Path, contents: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "invoices.py").write_text(
        "def extract(document):\n    return {'bytes': len(document.read())}\n"
    )
    with Databases() as databases, ExitStack() as stack:
        if contents.startswith("s3:"):
            server = stack.enter_context(objects.started())
            server.clear()
            for name, value in server.environment.items():
                monkeypatch.setenv(name, value)
        place = ("--database", databases.new(), "--contents", contents)
        with (
            running("serve", "--port", "0", *place) as program,
            working("invoices:extract", *place),
        ):
            with httpx.Client(base_url=program.url, headers=program.headers, timeout=60) as client:
                sent = [
                    client.post("/v1/documents?customer=acme", content=b"x" * size).json()["id"]
                    for size in (1, 1_000_000)
                ]
                ended = [client.get(f"/v1/documents/{id}?wait_s=30").json() for id in sent]
                results = [client.get(f"/v1/documents/{id}/result").json() for id in sent]
                workers = client.get("/v1/workers").json()["workers"]
            assert program.end() == 0

    assert [document["state"] for document in ended] == ["completed"] * 2
    assert results == [{"bytes": 1}, {"bytes": 1_000_000}]
    assert [(worker["alive"], worker["slots"]) for worker in workers] == [(True, 4)]


@contextmanager
def working(*arguments: str) -> "Iterator[subprocess.Popen[bytes]]":
    """Run `fairturn work` until it stops by itself."""
    with subprocess.Popen(
        [SCRIPT, "work", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            yield process
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()


def test_a_handler_that_cannot_be_loaded_ends_the_whole_command() -> None:
    result = fairturn_program("up", "absent:extract", "--port", "0")

    assert result.returncode == 1
    assert "absent:extract cannot be loaded" in result.stderr


def fairturn_program(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [SCRIPT, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_the_demo_has_a_queue_of_its_own_and_leaves_nothing(folder: Path) -> None:
    with running("up", "--demo", FAIRTURN_PORT="0", TMPDIR=str(folder)) as program:
        with httpx.Client(base_url=program.url, headers=program.headers, timeout=30) as client:
            wait_until(lambda: client.get("/v1/customers").json()["customers"], "somebody sends")
        assert program.end() == 0

    assert list(folder.iterdir()) == []


def test_the_page_that_the_command_opens_is_the_operators(folder: Path) -> None:
    browser, seen = folder / "browser", folder / "seen"
    browser.write_text(f'#!/bin/sh\nprintf %s "$1" > {seen}.part && mv {seen}.part {seen}\n')
    browser.chmod(0o700)
    shown = {"BROWSER": f"{browser} %s", "DISPLAY": ":0", "FAIRTURN_PORT": "0"}
    with running("up", "--demo", "--open", TMPDIR=str(folder), **shown) as program:
        wait_until(seen.exists, "the browser opens")
        opened = seen.read_text()
        with httpx.Client(follow_redirects=True, timeout=30) as client:
            page = client.get(opened)
            without = httpx.get(f"{program.url}/")
        assert program.end() == 0

    assert opened == f"{program.url}/login?token={program.token}"
    assert (page.status_code, str(page.url)) == (200, f"{program.url}/")
    assert "Log out" in page.text
    assert without.headers["location"] == "/login"


def test_without_keys_the_service_listens_at_this_machine_alone() -> None:
    for command in (("serve",), ("up", "invoices:extract")):
        said = error_of(fairturn(*command, "--host", "0.0.0.0"), 2)
        assert "without access keys every client would have operator permissions on 0.0.0.0" in said


def test_with_a_key_it_listens_elsewhere_and_says_what_is_missing() -> None:
    key = fairturn("keys", "make", "--role", "reader").stdout.strip()
    with running("serve", "--host", "0.0.0.0", "--port", "0") as program:
        url = program.url.replace("0.0.0.0", "127.0.0.1")
        assert httpx.get(f"{url}/v1/summary").status_code == 401
        assert httpx.get(f"{url}/v1/summary", headers=bearer(key)).status_code == 200
        assert program.end() == 0

    assert any("they would be sent unencrypted" in line for line in program.said)


def test_a_proxy_is_believed_only_if_it_is_trusted() -> None:
    key = fairturn("keys", "make", "--role", "reader").stdout.strip()
    forwarded = {
        **bearer(key),
        "X-Forwarded-For": "203.0.113.9",
        "X-Forwarded-Proto": "https",
    }
    plain = {**forwarded, "X-Forwarded-Proto": "http"}
    with running("serve", "--port", "0", "--trusted-proxy", "127.0.0.1") as program:
        assert httpx.get(f"{program.url}/v1/me", headers=forwarded).status_code == 200
        refused = httpx.get(f"{program.url}/v1/me", headers=plain)
        assert program.end() == 0

    assert refused.json()["code"] == "https_needed"


@pytest.mark.parametrize("command", [("serve",), ("up", "invoices:extract"), ("up", "--demo")])
def test_a_port_that_is_taken_ends_the_command_with_one_sentence_before_a_worker_starts(
    folder: Path, command: tuple[str, ...]
) -> None:
    (folder / "invoices.py").write_text("open('loaded', 'w')\ndef extract(document): pass\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = fairturn_program(*command, "--port", str(port))

    assert result.returncode == 1
    assert result.stderr == (
        f"Error: port {port} at 127.0.0.1 is in use; stop the program that listens there, or "
        "choose another port with --port (0 for a free one)\n"
    )
    assert not (folder / "loaded").exists()


@pytest.mark.parametrize(
    ("host", "why"),
    [("203.0.113.9", os.strerror(errno.EADDRNOTAVAIL).lower()), ("nowhere.invalid", "")],
)
def test_a_host_that_is_no_address_of_this_machine_is_wrong_use(host: str, why: str) -> None:
    fairturn("keys", "make", "--role", "reader")

    result = fairturn_program("serve", "--host", host)

    assert result.returncode == 2
    last = result.stderr.splitlines()[-1]
    assert last.startswith(f"Error: {host} is not an address of this machine ({why}")
    assert last.endswith(f"{why}); correct --host")
    assert last.count("(") == 1


def test_a_name_of_this_machine_listens_at_all_its_addresses_at_the_same_port() -> None:
    with running("serve", "--port", "0", "--host", "localhost") as program:
        port = int(program.url.rpartition(":")[2])
        found = socket.getaddrinfo("localhost", port, type=socket.SOCK_STREAM)
        answers = set()
        for family, _, _, _, address in found:
            with suppress(OSError), socket.socket(family) as made:
                made.bind((address[0], 0, *address[2:]))  # unless this machine has no such address
                host = f"[{address[0]}]" if family == socket.AF_INET6 else str(address[0])
                answers.add(httpx.get(f"http://{host}:{port}/livez").status_code)
        assert program.end() == 0

    assert answers == {200}


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("--port", "70000", "a port, from 0"),
        ("--rate", "often", "such as 600/minute"),
        ("--size-limit", "12 MB", "a size, such as 512MiB"),
        ("--trusted-proxy", "somewhere", "addresses or networks"),
        ("--customers-in-metrics", "100000", "from 0 to 1000"),
    ],
)
def test_a_wrong_setting_is_told_before_anything_is_opened(
    option: str, value: str, sentence: str
) -> None:
    assert sentence in error_of(fairturn("serve", option, value), 2)
    assert not Path("documents.db").exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--certificate", "c.pem"), "https needs both"),
        (("--certificate", "c.pem", "--private-key", "absent.pem"), "cannot be used"),
    ],
)
def test_a_certificate_that_cannot_be_used_is_told(
    folder: Path, options: tuple[str, ...], sentence: str
) -> None:
    (folder / "c.pem").write_text("no certificate")

    assert sentence in error_of(fairturn("serve", "--port", "0", *options), 2)


def self_signed(folder: Path) -> tuple[Path, Path]:
    """Return a certificate for this machine and its private key, as files."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    secret = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "fairturn")])
    here = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder(subject_name=name, issuer_name=name, public_key=secret.public_key())
        .serial_number(1)
        .not_valid_before(datetime(2020, 1, 1))
        .not_valid_after(datetime(2100, 1, 1))
        .add_extension(here, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(secret, hashes.SHA256())
    )
    certificate, private_key = folder / "server.pem", folder / "server.key"
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private_key.write_bytes(
        secret.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return certificate, private_key


def test_with_a_certificate_it_speaks_https_and_nothing_else(folder: Path) -> None:
    certificate, private_key = self_signed(folder)
    key = fairturn("keys", "make", "--role", "reader").stdout.strip()
    files = ("--certificate", str(certificate), "--private-key", str(private_key))
    with running("serve", "--port", "0", *files) as program:
        trusted = ssl.create_default_context(cafile=certificate)
        answer = httpx.get(f"{program.url}/v1/me", headers=bearer(key), verify=trusted)
        with pytest.raises(httpx.TransportError):
            httpx.get(program.url.replace("https", "http") + "/livez")
        assert program.end() == 0

    assert program.url.startswith("https://127.0.0.1:")
    assert (answer.status_code, answer.json()["role"]) == (200, "reader")


def test_keys_are_made_listed_replaced_and_ended() -> None:
    made = fairturn("keys", "make", "--customer", "acme", "--name", "the\x1b[2J scanner")
    shown = made.stdout.strip()
    id = shown.split("_")[1]
    assert re.fullmatch(r"ft_[0-9a-f]{12}_[0-9a-f]{64}", shown)

    (new,) = lines_of(fairturn("keys", "rotate", id, "--overlap", "60", "--json"))
    fairturn("keys", "revoke", id)

    table = fairturn("keys").stdout
    assert "\x1b" not in table
    listed = lines_of(fairturn("keys", "--json"))
    assert [(key["customer"], key["ends_at"] is None) for key in listed] == [
        ("acme", False),
        ("acme", True),
    ]
    assert new["shown"].split("_")[2] not in table + json.dumps(listed)
    assert "there is no key" in error_of(fairturn("keys", "revoke", "0" * 12), 3)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ((), "the key needs a role"),
        (("--role", "operator", "--customer", "acme"), "the role customer requires a customer"),
        (("--role", "customer"), "the role customer requires a customer"),
        (("--customer", ""), "customer is empty"),
    ],
)
def test_a_key_that_is_for_nobody_or_for_two_is_refused(
    options: tuple[str, ...], sentence: str
) -> None:
    assert sentence in error_of(fairturn("keys", "make", *options), 2)
