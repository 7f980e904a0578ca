"""The examples run as their first lines state."""

import os
import subprocess
import sys
from pathlib import Path

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
