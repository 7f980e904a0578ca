"""Two customers in a Celery app: a dump of 40 invoices, and one invoice that comes after it.

    pip install 'fairturn[celery,redis]'
    python celery_app.py                            # publishes; needs a Redis or Valkey
    celery -A celery_app worker --concurrency=1     # acme's invoice is the fourth, not the 41st

Run again within 25 minutes, it meets the counts of the first time: all of bulk's invoices have
priority 9 then, and acme's is the first. BROKER and COUNTS in the environment name other servers,
such as amqp://localhost for the broker.
"""

import os

from celery import Celery

from fairturn.integrations.celery import stamp

REDIS = "redis://localhost:6379/0"

app = Celery("celery_app", broker=os.environ.get("BROKER", REDIS))
stamped = stamp(
    app,
    customer=lambda task, args, kwargs: kwargs.get("customer_id"),
    counts=os.environ.get("COUNTS", REDIS),
    configure=True,
)


@app.task(bind=True, ignore_result=True)
def process(self, number, customer_id):  # type: ignore[no-untyped-def]
    decided = self.request.headers["fairturn"]
    print(f"{customer_id} {number}: priority {decided['priority']}, count {decided['count']}")


if __name__ == "__main__":
    for number in range(1, 41):
        process.delay(number, customer_id="bulk")
    process.delay(1, customer_id="acme")
    print(stamped.totals())
