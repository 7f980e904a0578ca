"""The nine priorities in a Celery app, in two lines:

    from fairturn.integrations.celery import stamp
    stamp(app, customer=lambda task, args, kwargs: kwargs.get("customer_id"), counts="redis://…")

A customer's task is given the rule's priority when it is published, in the broker's own numbers.
What was decided travels in the header `fairturn`. docs/celery.md says what this does and what not.
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
    Place,
    Totals,
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
    """Give every published task that has a customer the priority of the rule.

    `customer` gets the task's name, args and kwargs, and answers with the customer, or None.
    `counts` is where the counts are kept: an address, a file, or counts that were opened. While
    they do not answer, tasks are published with the priority `fallback`; with None the publisher
    gets the error instead. A task without a customer is left alone, unless `without_customer` is a
    priority.

    `configure` sets what the broker and the workers need. Settings that would make priorities
    meaningless are refused at the first publication and at the start of a worker, which looks at
    the broker's queues too; `check=False` leaves that out. `show` lets Flower show count and
    priority, among the keyword arguments of a task.
    """
    if getattr(app.amqp, "fairturn_stamp", None) is not None:
        raise ValueError(f"the app {app.main!r} is stamped already; call stamp once for each app")
    if without_customer is not None and not 1 <= without_customer <= LEVELS:
        raise ValueError(f"without_customer is {without_customer}; it must be from 1 to {LEVELS}")
    made = Stamp(
        app,
        customer=customer,
        decider=Decider(counts, rule=rule, fallback=fallback),
        without_customer=without_customer,
        configure=configure,
        check=check,
        show=show,
    )
    made.attach()
    return made


class Stamp:
    """What `stamp` made: how it goes, and a check for the start of a publisher."""

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
        self._configured = False  # whether the settings of the app are those that are needed
        self._advice = "" if configure else brokers.CONFIGURE
        self._check = check
        self._show = show
        # Not known before the first publication; looking a setting up each time takes long.
        self._driver = ""
        self._numbers: tuple[int, ...] = ()  # of each priority, in the broker's own
        self._routed = False
        self._thread = _Thread()

    def totals(self) -> Totals:
        """How many tasks this process has published, by how their priority came about."""
        return self._decider.totals()

    def check(self, *, prefetch: int | None = None) -> None:
        """Refuse settings and queues that would make priorities meaningless; say what to watch.

        A worker does this when it starts, with its `prefetch`. A publisher may do it at its start.
        """
        driver = self._load()
        if prefetch is None:
            problems = brokers.problems_for_publishers(self._app, driver)
        else:
            problems = brokers.problems_for_workers(self._app, driver, prefetch)
        brokers.refuse(problems, self._advice)
        if driver == brokers.RABBITMQ:
            self._look_at_queues()
        try:
            concerns = self._decider.counts.concerns()
        except StoreError as error:
            concerns = [self._decider.concern(error)]
        for concern in concerns:
            logger.warning("%s", concern)

    def _look_at_queues(self) -> None:
        try:
            with self._app.connection_for_write() as connection:
                connection.ensure_connection(max_retries=1, timeout=5)
                brokers.refuse(brokers.problems_of_queues(self._app, connection))
        except OperationalError as error:
            # Celery waits for its broker. What is wrong with the queues is said by the next start.
            logger.warning("the broker's queues could not be looked at: %s", error)

    # ── How it gets in between ───────────────────────────────────────────────────────────────────

    def attach(self) -> None:
        """Take part in what the app publishes. The app's settings are not read yet."""
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
        # Signals come too late to refuse, know no app, and are global; so the one object through
        # which an app publishes learns it. Its class is changed and not replaced in the app,
        # because a custom one must keep working, and an app stays one that can be pickled.
        app.amqp.__class__ = _stamping(type(app.amqp), self)

    def _on_configured(self, **_: Any) -> None:
        brokers.configure(self._app)
        self._configured = True

    def _load(self) -> str:
        """Load and configure the settings of the app; return its broker's driver.

        Celery publishes its settings to other threads before it calls `on_after_configure`. A
        thread that comes in between configures them itself: two that do so write the same values.
        """
        driver = brokers.driver_of(self._app)
        if self._configure and not self._configured:
            self._on_configured()
        return driver

    def _publish(
        self, name: str, args: Any = None, kwargs: Any = None, *more: Any, **options: Any
    ) -> Any:
        """In place of `app.send_task`, through which every publication goes: ask for the count, and
        let Celery build the message meanwhile."""
        if not self._driver:
            self._begin_to_publish()
        thread = self._thread
        outer = thread.decide  # publishing a task may publish another
        thread.decide = self._begin(name, args, kwargs, options)
        try:
            return self._send_task(name, args, kwargs, *more, **options)
        except Exception as error:
            brokers.explain(error)
            raise
        finally:
            thread.decide = outer

    def _begin_to_publish(self) -> None:
        driver = self._load()
        if self._check:
            brokers.refuse(brokers.problems_for_publishers(self._app, driver), self._advice)
        self._routed = bool(self._app.conf.task_routes)
        self._numbers = tuple(brokers.as_number(n, driver) for n in range(LEVELS + 1))
        self._driver = driver

    def _begin(
        self, name: str, args: Any, kwargs: Any, options: Mapping[str, Any]
    ) -> "_Decide | None":
        """How to decide over a task, or None if there is nothing to decide."""
        if options.get("priority") is not None or options.get("retries"):
            return None
        headers = options.get("headers")
        known = Decision.of_header(headers.get(HEADER)) if headers else None
        if known is not None:
            return lambda: known  # the headers of a task that goes on as another one
        try:
            customer = customer_name(self._customer(name, args or (), kwargs or {}))
        except Exception as error:
            failure = error
            return lambda: self._decider.fall_back(None, failure)
        working = self._app.current_worker_task
        made = None if working is None else _Made.by(working)
        if made is not None and customer in (None, made.parent.customer):
            customer = made.parent.customer
            inherited = self._decider.inherit(made.parent, made.count())
            if inherited is not None:
                return lambda: inherited
        if customer is None:
            return _of_nobody
        if self._routed or options.get("router"):
            # A route may give a priority by hand, and then there must be no check.
            return partial(self._decide_late, customer)
        return self._decider.begin(customer)

    def _decide_late(self, customer: str) -> Decision:
        return self._decider.begin(customer)()

    def mark(self, message: Any, options: dict[str, Any]) -> None:
        """Put what was decided into a message that is about to be sent."""
        decide = self._thread.decide
        if decide is None or options.get("priority") is not None:
            self._decider.add("by_hand")  # or by a route, which was not known before
            return
        if decide is _of_nobody:
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


def _of_nobody() -> Decision:
    raise AssertionError("a task without a customer has no decision")


class _Thread(threading.local):
    """What a thread is about to publish."""

    decide: _Decide | None = None


class _Made:
    """The task that is being worked on, as the maker of others."""

    def __init__(self, request: Any, parent: Decision) -> None:
        self._request = request
        self.parent = parent

    @staticmethod
    def by(task: Any) -> "_Made | None":
        parent = Decision.of_header((task.request.headers or {}).get(HEADER))
        return None if parent is None or parent.customer is None else _Made(task.request, parent)

    def count(self) -> int:
        """How many tasks this one had made before; one more from now on."""
        made: int = getattr(self._request, "fairturn_made", 0)
        self._request.fairturn_made = made + 1
        return made


def _stamping(kind: type, stamp: Stamp) -> type:
    class Stamping(kind):  # type: ignore[misc]  # its kind is the app's
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
    class Fairturn(bootsteps.Step):  # type: ignore[misc]  # Celery has no types
        """Looks at settings and queues before a worker starts."""

        def __init__(self, worker: Any, **_: Any) -> None:
            try:
                stamp.check(prefetch=worker.prefetch_multiplier)
            except BrokerRefused as error:
                _say_on_a_terminal(error)
                raise

    return Fairturn


def _say_on_a_terminal(error: BrokerRefused) -> None:
    """Under the command `celery worker` the sentence is enough, without a traceback."""
    import click

    if click.get_current_context(silent=True) is not None:
        raise click.ClickException(str(error)) from error


def _show(decision: Decision, message: Any) -> None:
    """Flower shows no headers, but the keyword arguments as they were written for people."""
    shown = str(message.headers.get("kwargsrepr") or "{}")
    if not shown.endswith("}"):
        return
    count = "none" if decision.count is None else decision.count
    inside = shown[:-1] + (", " if len(shown) > 2 else "")
    shown = f"{inside}'fairturn': 'priority {decision.priority}, count {count}'}}"
    message.headers["kwargsrepr"] = shown
    if message.sent_event:
        message.sent_event["kwargs"] = shown
