"""docs/http.md: its session runs as written, and it names every problem and every operation."""

import json
import os
import re
import socket
import subprocess
from pathlib import Path

from fairturn import Queue
from fairturn.service.app import make_app
from fairturn.service.problems import ProblemCode
from tests.commands import SCRIPT

PAGE = (Path(__file__).parent.parent / "docs" / "http.md").read_text(encoding="utf-8")


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def test_the_session_runs_as_written(tmp_path: Path) -> None:
    (program,) = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    path = os.pathsep.join([str(SCRIPT.parent), os.environ["PATH"]])

    done = subprocess.run(
        ["bash", "-e", "-c", program.replace("8751", str(free_port()))],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr + done.stdout
    assert json.loads((tmp_path / "receipt.json").read_text())["customer"] == "acme"
    assert json.loads((tmp_path / "result.json").read_text()) == {"bytes": 11}
    with Queue(tmp_path / "documents.db") as queue:
        assert [document.state for document in queue.iterate()] == ["completed"]
        assert queue.customer("acme").settings.weight == 2


def test_every_problem_is_named_with_its_status() -> None:
    table = PAGE.partition("## Problems")[2].partition("## ")[0]
    for code in ProblemCode:
        (row,) = [line for line in table.splitlines() if f"`{code}`" in line]
        assert str(code.status) in row.split("|")[1], code


def test_every_operation_is_named() -> None:
    with Queue(":memory:") as queue:
        paths = make_app(queue).openapi()["paths"]
    for path in paths:
        short = path.replace("/v1/keys/{id}/rotate", "/v1/keys").replace(
            "/v1/keys/{id}/revoke", "/v1/keys"
        )
        last = short.rpartition("{id}")[2]
        assert short in PAGE or f"…{last}" in PAGE, path
