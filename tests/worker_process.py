"""A worker in a separate process: `python -m tests.worker_process DATABASE HANDLER OPTIONS`.

It prints a line when it starts, one when it is asked to stop, and what it has done when it exits.
"""

import json
import sys

from fairturn import Queue, Worker
from fairturn.worker.events import Event, WorkerStopping


def main() -> None:
    database, handler, options = sys.argv[1:]

    def say(what: str) -> None:
        sys.stdout.write(what + "\n")
        sys.stdout.flush()

    def hear(event: Event) -> None:
        if isinstance(event, WorkerStopping):
            say("stopping")

    with Queue(database) as queue:
        worker = Worker(queue, handler, on_event=hear, **json.loads(options))
        say("working")
        say(json.dumps(worker.run()._asdict()))


if __name__ == "__main__":
    main()
