"""The nine priorities in a Celery app, in two lines:

    from fairturn.integrations.celery import stamp
    stamp(app, customer=lambda task, args, kwargs: kwargs.get("customer_id"), counts="redis://…")

A customer's task gets the priority of the rule when it is published, as the broker's number. The
header `fairturn` has the decision. docs/celery.md describes guarantees and limits.
"""

import threading
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

from celery import bootsteps
from kombu.exceptions import OperationalError

from fairturn.errors import BrokerRefused, StoreError
from fairturn.integrations import brokers
from fairturn.integrations.decision import (
    FALLBACK,
    Customer,
    Decider,
    Decision,
    DecisionTotals,
    Place,
    customer_name,
    logger,
)
from fairturn.priority import LEVELS, Rule

HEADER = "fairturn"


def stamp(
    app: Any,
    *,
    customer: Customer,
    counts: Place,
    rule: Rule | None = None,
    fallback: int | None = FALLBACK,
    without_customer: int | None = None,
    configure: bool = False,
    check: bool = True,
    show: bool = True,
) -> "Stamp":
    """Give every published task of a customer the priority of the rule.

    `customer` is called with the task's name, args and kwargs, and returns the customer or None.
    `counts` is a URL, a file or an object with the methods of `Counts`. While the counts are
    unavailable, tasks are published with the priority `fallback`; if that is None, the publisher
    gets `StoreUnavailable`. A task without a customer is not changed, unless `without_customer` is
    a priority.

    `configure` sets the settings that the broker and the workers need. The first publish and
    the start of a worker raise `BrokerRefused` for settings with which priorities have no effect;
    a worker also checks the broker's queues. `check=False` skips these checks. `show` lets Flower
    display count and priority among the keyword arguments of a task.
    """
    if getattr(app.amqp, "fairturn_stamp", None) is not None:
        raise ValueError(f"the app {app.main!r} is already stamped; call stamp once per app")
    if without_customer is not None and not 1 <= without_customer <= LEVELS:
        raise ValueError(f"without_customer is {without_customer}; it must be from 1 to {LEVELS}")
    stamp = Stamp(
        app,
        customer=customer,
        decider=Decider(counts, rule=rule, fallback=fallback),
        without_customer=without_customer,
        configure=configure,
        check=check,
        show=show,
    )
    stamp.attach()
    return stamp


class Stamp:
    """The result of `stamp`: totals, and a check for the start of a publisher."""

    def __init__(
        self,
        app: Any,
        *,
        customer: Customer,
        decider: Decider,
        without_customer: int | None,
        configure: bool,
        check: bool,
        show: bool,
    ) -> None:
        self._app = app
        self._customer = customer
        self._decider = decider
        self._without_customer = without_customer
        self._configure = configure
        self._configured = False
        self._advice = "" if configure else brokers.CONFIGURE
        self._check = check
        self._show = show
        # Cached at the first publish, because reading a setting is slow.
        self._driver = ""
        self._numbers: tuple[int, ...] = ()  # by priority: the broker's number
        self._routed = False
        self._thread = _PublishContext()

    def totals(self) -> DecisionTotals:
        """Return how many tasks this process has published, by the source of their priority."""
        return self._decider.totals()

    def check(self, *, prefetch: int | None = None) -> None:
        """Raise `BrokerRefused` for settings and queues with which priorities have no effect, and
        log concerns about the counts. A worker calls it at its start, with its `prefetch`."""
        driver = self._load()
        if prefetch is None:
            problems = brokers.problems_for_publishers(self._app, driver)
        else:
            problems = brokers.problems_for_workers(self._app, driver, prefetch)
        brokers.refuse(problems, self._advice)
        if driver == brokers.RABBITMQ:
            self._check_queues()
        try:
            concerns = self._decider.counts.concerns()
        except StoreError as error:
            concerns = [self._decider.concern(error)]
        for concern in concerns:
            logger.warning("%s", concern)

    def _check_queues(self) -> None:
        try:
            with self._app.connection_for_write() as connection:
                connection.ensure_connection(max_retries=1, timeout=5)
                brokers.refuse(brokers.problems_of_queues(self._app, connection))
        except OperationalError as error:
            # Celery waits for its broker, and so must not fail here. The next start checks again.
            logger.warning("the broker's queues could not be checked: %s", error)

    # ── Hooks ────────────────────────────────────────────────────────────────────────────────────

    def attach(self) -> None:
        """Hook into the app, without loading its settings."""
        app = self._app
        if self._configure:
            if app.configured:
                self._on_configured()
            else:
                app.on_after_configure.connect(self._on_configured, weak=False)
        if self._check:
            app.steps["worker"].add(_step_of(self))
        self._send_task = app.send_task
        app.send_task = self._publish
        # Not by signals: they are global, do not name the app and come too late to reject a task.
        # The class of the app's publishing object is changed, so that a custom one keeps working
        # and the app can still be pickled (decision 0018).
        app.amqp.__class__ = _stamping(type(app.amqp), self)

    def _on_configured(self, **_: Any) -> None:
        brokers.configure(self._app)
        self._configured = True

    def _load(self) -> str:
        """Load and configure the settings of the app; return its broker's driver.

        Other threads can see the settings before Celery calls `on_after_configure`. Such a thread
        configures them itself: both write the same values.
        """
        driver = brokers.driver_of(self._app)
        if self._configure and not self._configured:
            self._on_configured()
        return driver

    def _publish(
        self, name: str, args: Any = None, kwargs: Any = None, *more: Any, **options: Any
    ) -> Any:
        """Replaces `app.send_task`, which every publish calls: request the count, and let
        Celery build the message while the request is in flight."""
        if not self._driver:
            self._prepare()
        thread = self._thread
        outer = thread.decide  # publishing a task may publish another one
        thread.decide = self._begin(name, args, kwargs, options)
        try:
            return self._send_task(name, args, kwargs, *more, **options)
        except Exception as error:
            brokers.explain(error)
            raise
        finally:
            thread.decide = outer

    def _prepare(self) -> None:
        driver = self._load()
        if self._check:
            brokers.refuse(brokers.problems_for_publishers(self._app, driver), self._advice)
        self._routed = bool(self._app.conf.task_routes)
        self._numbers = tuple(brokers.as_number(n, driver) for n in range(LEVELS + 1))
        self._driver = driver

    def _begin(
        self, name: str, args: Any, kwargs: Any, options: Mapping[str, Any]
    ) -> "_Decide | None":
        """Return a function that returns the decision, or None if there is nothing to decide."""
        if options.get("priority") is not None or options.get("retries"):
            return None
        headers = options.get("headers")
        known = Decision.of_header(headers.get(HEADER)) if headers else None
        if known is not None:
            return lambda: known  # headers copied from another task
        try:
            customer = customer_name(self._customer(name, args or (), kwargs or {}))
        except Exception as error:
            failure = error
            return lambda: self._decider.fall_back(None, failure)
        task = self._app.current_worker_task
        parent = None if task is None else _customers_decision(task)
        if parent is not None and customer in (None, parent.customer):
            customer = parent.customer
            children: int = getattr(task.request, "fairturn_made", 0)
            task.request.fairturn_made = children + 1
            inherited = self._decider.inherit(parent, children)
            if inherited is not None:
                return lambda: inherited
        if customer is None:
            return _without_customer
        if self._routed or options.get("router"):
            # A route may set an explicit priority, and then the count must not change.
            return partial(self._decide_late, customer)
        return self._decider.begin(customer)

    def _decide_late(self, customer: str) -> Decision:
        return self._decider.begin(customer)()

    def mark(self, message: Any, options: dict[str, Any]) -> None:
        """Write the decision into a message that is about to be sent."""
        decide = self._thread.decide
        if decide is None or options.get("priority") is not None:
            self._decider.add("by_hand")  # or by a route
            return
        if decide is _without_customer:
            self._decider.add("without_customer")
            if self._without_customer is not None:
                options["priority"] = self._numbers[self._without_customer]
            return
        decision = decide()
        options["priority"] = self._numbers[decision.priority]
        message.headers[HEADER] = decision.as_header()
        if self._show:
            _show(decision, message)


_Decide = Callable[[], Decision]


def _without_customer() -> Decision:
    raise AssertionError("a task without a customer has no decision")


class _PublishContext(threading.local):
    decide: _Decide | None = None


def _customers_decision(task: Any) -> Decision | None:
    """Return the decision about a running task; None if it has none, or no customer."""
    decision = Decision.of_header((task.request.headers or {}).get(HEADER))
    return None if decision is None or decision.customer is None else decision


def _stamping(kind: type, stamp: Stamp) -> type:
    class Stamping(kind):  # type: ignore[misc]  # the base class is the app's
        fairturn_stamp = stamp

        @cached_property
        def send_task_message(self) -> Callable[..., Any]:
            send = super().send_task_message

            def send_stamped(producer: Any, name: str, message: Any, **options: Any) -> Any:
                stamp.mark(message, options)
                return send(producer, name, message, **options)

            return send_stamped

    return Stamping


def _step_of(stamp: Stamp) -> type:
    class FairturnStep(bootsteps.Step):  # type: ignore[misc]  # Celery has no types
        """Checks settings and queues before a worker starts."""

        def __init__(self, worker: Any, **_: Any) -> None:
            try:
                stamp.check(prefetch=worker.prefetch_multiplier)
            except BrokerRefused as error:
                _raise_for_command(error)
                raise

    return FairturnStep


def _raise_for_command(error: BrokerRefused) -> None:
    """Raise an error that the command `celery worker` prints without a traceback."""
    import click

    if click.get_current_context(silent=True) is not None:
        raise click.ClickException(str(error)) from error


def _show(decision: Decision, message: Any) -> None:
    """Add the decision to `kwargsrepr`, because Flower does not display headers."""
    shown = str(message.headers.get("kwargsrepr") or "{}")
    if not shown.endswith("}"):
        return
    count = "none" if decision.count is None else decision.count
    inside = shown[:-1] + (", " if len(shown) > 2 else "")
    shown = f"{inside}'fairturn': 'priority {decision.priority}, count {count}'}}"
    message.headers["kwargsrepr"] = shown
    if message.sent_event:
        message.sent_event["kwargs"] = shown
