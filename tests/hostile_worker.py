"""A worker under attack: `python -m tests.hostile_worker FOLDER REVERSED OPTIONS ATTACKS`.

REVERSED is the secret backwards, so that no command line contains it. The worker has the secret in
its environment, its memory and an inheritable descriptor, serves its queue with access keys, and
runs a document of a victim beside the attacks, which run one after the other. The program prints
its process id and then, as JSON, the outcome of each attack and of the victim.
"""

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from fairturn import Backoff, Queue, Worker
from tests.hostile import attack

AT_ONCE = Backoff(first_s=0, most_s=0)
NAMES = ("PGPASSWORD", "AWS_SECRET_ACCESS_KEY", "FAIRTURN_DATABASE", "FAIRTURN_KEY", "API_TOKEN")


def main() -> None:
    folder, reversed_secret, options, attacks = sys.argv[1], *map(json.loads, sys.argv[2:])
    secret = reversed_secret[::-1]
    os.environ.update(dict.fromkeys(NAMES, secret))
    kept = os.open(Path(folder, "secret"), os.O_RDWR | os.O_CREAT, 0o600)
    os.write(kept, secret.encode())
    os.set_inheritable(kept, True)
    with (
        Queue(Path(folder, "documents.db"), synchronous="NORMAL", attempts_max=1) as queue,
        served(queue) if "network" in attacks else nullcontext("") as url,
    ):
        payload = {"folder": folder, "reversed": reversed_secret, "port": url.rpartition(":")[2]}
        victim = queue.submit("victim", payload={**payload, "do": "hold", "secret": secret})
        worker = Worker(queue, attack, concurrency=2, retry=AT_ONCE, **options)
        thread = threading.Thread(target=worker.run)
        thread.start()
        say(os.getpid())
        ended = []
        for do in attacks:
            id = queue.submit("attacker", payload={**payload, "do": do}).id
            ended.append(outcome(queue, id))
        Path(folder, "go on").touch()
        ended.append(outcome(queue, victim.id))
        worker.stop()
        thread.join()
    say(ended)


@contextmanager
def served(queue: Queue) -> Iterator[str]:
    """Serve the queue with access keys. It is imported here because it takes seconds."""
    from tests import http_server

    http_server.key_for(queue)
    with http_server.served(queue) as url:
        yield url


def outcome(queue: Queue, id: str) -> list[Any]:
    document = queue.wait(id, 60)
    done = document.state.value == "completed"
    return [document.state.value, queue.result(id) if done else document.error]


def say(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
