"""Two customers in a Celery app: bulk publishes 40 invoices, and then acme publishes one.

    pip install '.[celery,redis]'                   # in a clone of the repository
    python celery_app.py                            # publishes; needs Redis or Valkey
    celery -A celery_app worker --concurrency=1     # runs acme's invoice fourth, not 41st

In a second run within 25 minutes the counts have not been reset: bulk's invoices have priority 9,
and acme's runs first. The environment variables BROKER and COUNTS are the URLs of other servers,
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
