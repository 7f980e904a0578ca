"""The Celery app of the benchmark's workers, configured by environment variables."""

import os
import time
from typing import Any

from celery import Celery

from fairturn.integrations.celery import stamp

NAP_S = 0.02
PLAIN, BY_HAND, STAMPED = "plain Celery", "priorities by hand", "stamp"


def make(mode: str, broker: str, counts: str, queue: str, record: str) -> Celery:
    """Return a typical app for each mode."""
    app = Celery("bench", broker=broker, set_as_current=False)
    app.conf.update(
        task_default_queue=queue,
        task_ignore_result=True,
        broker_connection_retry_on_startup=True,
    )
    if mode == BY_HAND:
        app.conf.update(task_acks_late=True, worker_prefetch_multiplier=1)
        if broker.startswith("amqp"):
            app.conf.task_queue_max_priority = 10
        else:
            app.conf.broker_transport_options = {"priority_steps": list(range(10))}
    if mode == STAMPED:
        stamp(
            app,
            customer=lambda task, args, kwargs: kwargs.get("customer_id"),
            counts=counts,
            configure=True,
        )

    @app.task(name="nap", shared=False)
    def nap(customer_id: Any, published_at: float) -> None:
        waited_s = time.time() - published_at
        file = os.open(record, os.O_APPEND | os.O_CREAT | os.O_WRONLY)
        os.write(file, f"{customer_id} {waited_s}\n".encode())
        os.close(file)
        time.sleep(NAP_S)

    return app


if "FAIRTURN_BENCH_CELERY" in os.environ:
    app = make(*os.environ["FAIRTURN_BENCH_CELERY"].split("|"))
