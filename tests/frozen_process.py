"""A process that a test freezes: `python -m tests.frozen_process`, with lines of JSON.

For each line it opens the queue, answers "ready", waits for another line, runs the operation, and
answers with the name of the error that it raised, or with null.
"""

import json
import sys
from typing import Any

from fairturn.contents.local import Folder
from fairturn.errors import FairturnError
from fairturn.queue import Queue
from fairturn.stores.postgres import PostgresStore
from tests.faults import NAMED, Known


def main() -> None:
    while line := sys.stdin.readline():
        url, folder, name, values = json.loads(line)
        known = Known.from_json(values)
        clock = known.clock
        with Queue(PostgresStore(url, clock=clock), contents=Folder(folder, clock=clock)) as queue:
            queue.summary()  # opens a connection
            _answer("ready")
            sys.stdin.readline()
            try:
                NAMED[name].call(known, queue)
                _answer(None)
            except FairturnError as error:
                _answer(type(error).__name__)


def _answer(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
