"""The examples run as their first lines state."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from fairturn import Queue, State
from tests.servers import valkey
from tests.test_handlers import until
from tests.test_worker import InBackground, drain

EXAMPLES = Path(__file__).parent.parent / "examples"
PIPELINE = EXAMPLES / "pipeline"


def test_the_celery_example_serves_the_customer_who_comes_after_a_dump(tmp_path: Path) -> None:
    with valkey.started() as server:
        environment = {**os.environ, "BROKER": server.url, "COUNTS": server.url}
        published = subprocess.run(
            [sys.executable, EXAMPLES / "celery_app.py"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        ran = []
        celery = [sys.executable, "-W", "ignore", "-m", "celery", "--workdir", str(EXAMPLES)]
        with subprocess.Popen(
            [*celery, "-A", "celery_app", "worker", "--pool=solo", "--without-mingle"],
            cwd=tmp_path,
            env={**environment, "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as worker:
            assert worker.stdout is not None
            for line in worker.stdout:
                if ": priority " in line:
                    ran.append(
                        line[line.index("] ") + 2 :].strip() if "] " in line else line.strip()
                    )
                if len(ran) == 41:
                    break
            worker.kill()

    assert "checked=41, reset=2" in published.stdout
    assert ran[:5] == [
        "bulk 1: priority 1, count 0",
        "bulk 2: priority 1, count -1",
        "bulk 3: priority 1, count -2",
        "acme 1: priority 1, count 0",
        "bulk 4: priority 2, count -3",
    ]
    assert ran[-1] == "bulk 40: priority 9, count -39"


@pytest.fixture(params=["memory", "file"])
def queue(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Queue]:
    database = ":memory:" if request.param == "memory" else tmp_path / "documents.db"
    with Queue(database, kinds="open") as queue:
        yield queue


@pytest.fixture
def delivered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the pipeline delivers to."""
    monkeypatch.syspath_prepend(PIPELINE)
    monkeypatch.setenv("DELIVERED", str(tmp_path / "delivered"))
    return tmp_path / "delivered"


@contextmanager
def ocr_service(port: int = 0) -> Iterator[str]:
    """Run the OCR service of the example and yield its URL."""
    command = [sys.executable, str(PIPELINE / "ocr_service.py"), str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as service:
        try:
            assert service.stdout is not None
            yield service.stdout.readline().split()[-1]
        finally:
            service.kill()


OPTIONS: dict[str, Any] = {"pass_env": ["OCR_URL", "DELIVERED"]}


def test_the_pipeline_example_delivers_a_letter_and_a_scan(
    queue: Queue, delivered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    letter, scan = (
        queue.submit("acme", file=PIPELINE / name, kind="text", expires_in_s=7_200).id
        for name in ("letter.pdf", "scan.pdf")
    )
    with ocr_service() as url:
        monkeypatch.setenv("OCR_URL", url)
        drain(queue, "pipeline:handlers", **OPTIONS)

    assert queue.result(letter) == {"pages": 2, "steps": 2}
    assert queue.result(scan) == {"pages": 1, "steps": 3}
    text = (delivered / "acme" / f"{letter}.txt").read_text()
    assert text == "Dear customer, your invoice is attached.\n\nInvoice 17: 42.00 EUR"
    size = (PIPELINE / "scan.pdf").stat().st_size
    assert (delivered / "acme" / f"{scan}.txt").read_text() == f"Recognised in {size} bytes"
    assert [attempt.kind for attempt in queue.attempts(scan)] == ["text", "ocr"]


def test_the_pipeline_example_waits_for_its_service_and_uses_no_attempt(
    queue: Queue, delivered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    monkeypatch.setenv("OCR_URL", f"http://127.0.0.1:{port}/recognise")
    file = PIPELINE / "scan.pdf"
    scans = [queue.submit("acme", file=file, kind="text").id for _ in range(20)]

    with InBackground(queue, "pipeline:handlers", **OPTIONS):
        until(lambda: any(one.resumed_at_us is None for one in queue.outages()), "it is held")
        (outage,) = queue.outages()
        with ocr_service(port):
            until(lambda: queue.summary().completed == 20, "all are delivered")

    assert (outage.service, outage.kinds) == ("ocr-service", ("ocr",))
    assert "refused" in outage.error
    assert {queue.get(id).attempts for id in scans} == {1}
    assert queue.summary().retried == 0


def test_the_pipeline_example_postpones_documents_of_a_customer_that_is_closed(
    queue: Queue, delivered: Path
) -> None:
    (delivered / "acme").mkdir(parents=True)
    (delivered / "acme" / "closed").touch()
    id = queue.submit("acme", file=PIPELINE / "letter.pdf", kind="text").id

    with InBackground(queue, "pipeline:handlers", **OPTIONS):
        until(lambda: queue.get(id).state is State.DELAYED, "it is postponed")

    document = queue.get(id)
    assert (document.kind, document.step, document.attempts) == ("export", 1, 0)


def test_the_containers_of_the_example_run_without_root_and_without_privileges() -> None:
    for name, service in compose()["services"].items():
        assert service["user"] not in ("root", "0", 0), name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "privileged" not in service, name
        assert name == "db" or (service["read_only"] and service["pids_limit"]), name


def test_the_example_contains_no_password() -> None:
    text = (EXAMPLES / "compose.yaml").read_text()

    passwords = [
        *re.findall(r"PASSWORD: (.+)", text),
        *re.findall(r"postgresql://\w+:(.+)@", text),
        *re.findall(r"PASSWORD '(.+)'", text),
    ]

    assert len(passwords) == 4
    for password in passwords:
        assert re.fullmatch(r"\$\{(OWNER|APP)_PASSWORD:\?[^}]+\}", password), password


def test_every_version_of_the_example_is_pinned() -> None:
    text = (EXAMPLES / "compose.yaml").read_text()

    images = re.findall(r"(?:image:|FROM) (\S+)", text)
    assert len(images) == 3
    assert all(re.search(r":\d+\.\d+", image) for image in images)
    assert re.findall(r"'fairturn\[postgres\](.*?)'", text) == ["==0.2.0"]


def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((EXAMPLES / "compose.yaml").read_text())
    return loaded
