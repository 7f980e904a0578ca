"""A Celery app for workers and for the tests' own process, configured by environment variables.

Each task appends a line to the record when it runs: its name and its headers.
"""

import gc
import json
import os
from typing import Any

from celery import Celery
from kombu import pools

from fairturn.config import open_counts
from fairturn.integrations.celery import Stamp, stamp


def make(
    broker: str,
    counts: Any,
    queue: str,
    record: str = os.devnull,
    *,
    timeout_s: float = 30.0,
    **options: Any,
) -> Celery:
    """Return an app with its own queue and tasks, and a long timeout for counts on a busy
    machine."""
    if isinstance(counts, str):
        counts = open_counts(counts, rule=options.get("rule"), timeout_s=timeout_s)
    app = Celery("tests", broker=broker, set_as_current=False)
    app.conf.update(
        task_default_queue=queue,
        result_backend="cache+memory://" if broker.startswith("amqp") else broker,
        task_ignore_result=True,
        broker_connection_retry_on_startup=True,
        worker_hijack_root_logger=False,
        task_publish_retry_policy={"max_retries": 100, "interval_step": 0.05},
    )
    app.stamped = stamp(
        app,
        **{
            "customer": lambda task, args, kwargs: kwargs.get("customer_id"),
            "counts": counts,
            "configure": True,
            **options,
        },
    )
    _add_tasks(app, record)
    return app


def close_all() -> None:
    """Close the connections of all apps in this process. Celery leaves some to the garbage
    collector, which would warn about them in a later test."""
    pools.reset()  # type: ignore[no-untyped-call]
    gc.collect()


def stamp_of(app: Celery) -> Stamp:
    stamped: Stamp = app.stamped
    return stamped


def _add_tasks(app: Celery, record: str) -> None:
    def note(task: Any, number: Any) -> None:
        line = {
            "task": task.name,
            "number": number,
            "retries": task.request.retries,
            "priority": task.request.delivery_info["priority"],
            "fairturn": (task.request.headers or {}).get("fairturn"),
        }
        file = os.open(record, os.O_APPEND | os.O_CREAT | os.O_WRONLY)
        os.write(file, json.dumps(line).encode() + b"\n")
        os.close(file)

    @app.task(name="process", bind=True, shared=False)
    def process(self: Any, *args: Any, number: Any = None, customer_id: Any = None) -> int:
        note(self, number)
        return 1

    @app.task(name="unsteady", bind=True, shared=False)
    def unsteady(self: Any, number: int, customer_id: Any = None) -> None:
        note(self, number)
        if self.request.retries < 2:
            raise self.retry(countdown=0)

    @app.task(name="unpack", bind=True, shared=False)
    def unpack(self: Any, n: int, customer_id: Any = None) -> None:
        note(self, None)
        for number in range(n):
            process.delay(number=number, customer_id=customer_id)


# The app that `celery -A tests.celery_app` loads.
if "FAIRTURN_TEST_BROKER" in os.environ:
    app = make(
        os.environ["FAIRTURN_TEST_BROKER"],
        os.environ["FAIRTURN_TEST_COUNTS"],
        os.environ["FAIRTURN_TEST_QUEUE"],
        os.environ["FAIRTURN_TEST_RECORD"],
        **json.loads(os.environ.get("FAIRTURN_TEST_OPTIONS", "{}")),
    )
