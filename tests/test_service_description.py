"""The description of the service is complete and true: every response is one that it defines, in
the format that it defines, and never an internal error."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import schemathesis
from hypothesis import HealthCheck, seed, settings
from schemathesis import Case
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.pytest.lazy import get_all_tests
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from fairturn import Queue
from fairturn.clock import stopwatch
from fairturn.model import SETTING_NAMES, Settings
from fairturn.service.app import make_app
from fairturn.service.options import ServiceLimits
from fairturn.wire import LINES, WAIT_S_MAX
from tests.commands import complete, kill
from tests.http_server import bearer, key_for, served
from tests.servers.queues import Databases

THOROUGH = os.environ.get("FAIRTURN_HYPOTHESIS") == "thorough"
EXAMPLES, STEPS = (300, 30) if THOROUGH else (6, 6)
LONG_S, LONG_EXAMPLES = 300.0, 25
CHECKED = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    response_headers_conformance,
    negative_data_rejection,
]
# The key is always sent, even for cases that omit it.
CHECKED_ON_THE_ROAD = CHECKED[:-1]
QUICK = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=not THOROUGH,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@schemathesis.serializer("application/x-ndjson")
def lines(ctx: Any, value: Any) -> Any:
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else json.dumps(value)


class Described(NamedTuple):
    """A server with documents in its queue, and the headers of its keys."""

    url: str
    keys: dict[str, dict[str, str]]  # by role
    queue: Queue


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Described]:
    with started(tmp_path_factory.mktemp("described") / "documents.db") as described:
        yield described


@contextmanager
def started(place: Path | str) -> Iterator[Described]:
    with Queue(place) as queue:
        for _ in range(3):
            queue.submit("acme", payload=1)
        complete(queue)
        kill(queue)
        keys = {"operator": bearer(key_for(queue)), "customer": bearer(key_for(queue, "acme"))}
        with served(queue, ServiceLimits(rate="100000/second", pause_s_max=2)) as url:
            yield Described(url, keys, queue)


def described() -> dict[str, Any]:
    with Queue(":memory:") as queue:
        return make_app(queue).openapi()


DESCRIPTION = described()
NEVER_ENDS = "/v1/events"
OPERATIONS = [
    (method.upper(), path)
    for path, methods in DESCRIPTION["paths"].items()
    if path != NEVER_ENDS
    for method in methods
]


@pytest.fixture(scope="module")
def operations() -> BaseSchema:
    return schemathesis.openapi.from_dict(DESCRIPTION).exclude(path=NEVER_ENDS)


# Like schemathesis' own `parametrize`, but at run time: creating the cases of all operations takes
# seconds, and each process of a run collects all tests.
@pytest.mark.parametrize("role", ["operator", "customer"])
@pytest.mark.parametrize("method, path", OPERATIONS)
def test_every_operation_answers_as_it_is_described(
    asked: Described, operations: BaseSchema, method: str, path: str, role: str
) -> None:
    answer = examples_of(operations, method, path, answers_as_described, QUICK)

    answer(url=asked.url, headers=asked.keys[role])


@pytest.mark.long
@pytest.mark.parametrize("store", ["sqlite", "postgres"])
def test_in_ten_minutes_no_operation_has_an_internal_error(
    operations: BaseSchema, tmp_path: Path, store: str
) -> None:
    """Five minutes on each store, with an operator's and a customer's key in turns."""
    quick = settings(QUICK, max_examples=LONG_EXAMPLES, derandomize=False)
    rounds = 0
    with ExitStack() as stack:
        place: Path | str = tmp_path / "documents.db"
        if store == "postgres":
            place = stack.enter_context(Databases()).new()
        asked = stack.enter_context(started(place))
        until = stopwatch() + LONG_S
        while stopwatch() < until:
            rounds += 1
            for method, path in OPERATIONS:
                for headers in asked.keys.values():
                    answer = examples_of(operations, method, path, has_no_internal_error, quick)
                    seed(rounds)(answer)(url=asked.url, headers=headers)
            # Otherwise a full queue or another mode would hide the rest.
            asked.queue.configure(**{name: getattr(Settings(), name) for name in SETTING_NAMES})

    assert rounds > 0


def examples_of(
    operations: BaseSchema, method: str, path: str, test: Callable[..., None], quick: settings
) -> Callable[..., None]:
    """Return a function that calls `test` with generated requests of one operation."""
    (made,) = get_all_tests(
        schema=operations.include(method=method, path=path),
        test_func=test,
        settings=quick,
        given_kwargs=None,
    )
    assert isinstance(made, Ok), made
    _, answer = made.ok()
    return answer


def has_no_internal_error(case: Case[Any], url: str, headers: dict[str, str]) -> None:
    shorten_wait(case)
    case.call_and_validate(base_url=url, headers=headers, checks=CHECKED_ON_THE_ROAD)


def answers_as_described(case: Case[Any], url: str, headers: dict[str, str]) -> None:
    shorten_wait(case)
    # Of a repeated parameter the last one counts, and a query cannot contain an object: the request
    # may be valid after all.
    strange = any(isinstance(value, list | dict) for value in (case.query or {}).values())
    # An object instead of the text of a batch is sent as a line, which is valid from a customer.
    strange = strange or (case.media_type == LINES and isinstance(case.body, dict))
    checks = CHECKED_ON_THE_ROAD if strange else CHECKED
    case.call_and_validate(base_url=url, headers=headers, checks=checks)


def shorten_wait(case: Case[Any]) -> None:
    wait_s = case.query.get("wait_s") if isinstance(case.query, dict) else None
    if isinstance(wait_s, int | float) and 0.01 < wait_s <= WAIT_S_MAX:
        case.query["wait_s"] = 0.01  # a longer one is rejected at once


def test_one_operation_after_the_other_answers_as_it_is_described(
    asked: Described, operations: BaseSchema
) -> None:
    url, headers = asked.url, asked.keys["operator"]

    class Road(operations.as_state_machine()):  # type: ignore[misc]
        def get_call_kwargs(self, case: Case[Any]) -> dict[str, Any]:
            if isinstance(case.query, dict):
                case.query.pop("wait_s", None)
            return {"base_url": url, "headers": headers}

        def validate_response(self, response: Any, case: Case[Any], **more: Any) -> None:
            case.validate_response(response, checks=CHECKED_ON_THE_ROAD)

    Road.run(settings=settings(QUICK, stateful_step_count=STEPS))


def test_every_operation_has_a_name_and_says_what_it_does() -> None:
    for path, methods in described()["paths"].items():
        for operation in methods.values():
            assert operation["operationId"].isidentifier(), path
            assert operation["description"], path
            assert operation["tags"], path


def test_every_problem_that_an_operation_can_answer_has_a_form() -> None:
    for path, methods in described()["paths"].items():
        for operation in methods.values():
            for status, response in operation["responses"].items():
                if int(status) >= 400 and path != "/readyz":
                    assert "application/problem+json" in response["content"], (path, status)
