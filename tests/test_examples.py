"""The examples run as their first lines state."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.servers import valkey

EXAMPLES = Path(__file__).parent.parent / "examples"


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
