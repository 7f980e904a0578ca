"""The dashboard and the alerts use metrics that `/metrics` really has, in PromQL."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from fairturn import Queue
from fairturn.service.app import make_app
from fairturn.service.options import ServiceLimits
from tests.commands import claim, complete, hold
from tests.http_server import TOKEN, asked, bearer

FOLDER = Path(__file__).parent.parent / "observability"
DASHBOARD = json.loads((FOLDER / "grafana-dashboard.json").read_text(encoding="utf-8"))
ALERTS = yaml.safe_load((FOLDER / "alerts.yml").read_text(encoding="utf-8"))
OF_PROMETHEUS = {"up"}
LABELS_OF_PROMETHEUS = {"job", "instance"}


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Return every metric of a service in use, with its labels."""
    with Queue(tmp_path_factory.mktemp("shown") / "documents.db") as queue:
        for _ in range(5):
            queue.submit("acme", payload=1)
        complete(queue)
        claim(queue)
        hold(queue)
        app = make_app(queue, ServiceLimits(customers_in_metrics=10), token=TOKEN)
        text = asked(app, "GET", "/metrics", headers=bearer(TOKEN)).text
    return {
        sample.name: set(sample.labels)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def expressions() -> Iterator[tuple[str, str]]:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"].replace("$job", "fairturn")
    for group in ALERTS["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


def selectors(expression: Any) -> Iterator[Any]:
    """Return the metrics in an expression."""
    if isinstance(expression, promql_parser.VectorSelector):
        yield expression
    for name in ("expr", "lhs", "rhs", "vector_selector", "param"):
        inner = getattr(expression, name, None)
        if inner is not None and not isinstance(inner, str):
            yield from selectors(inner)
    for inner in getattr(expression, "args", None) or ():
        yield from selectors(inner)


@pytest.mark.parametrize(("where", "text"), list(expressions()))
def test_every_expression_is_one_and_names_numbers_that_there_are(
    shown: dict[str, set[str]], where: str, text: str
) -> None:
    found = list(selectors(promql_parser.parse(text)))

    assert found, f"{where} looks at nothing"
    for selector in found:
        if selector.name in OF_PROMETHEUS:
            continue
        assert selector.name in shown, f"{where}: {selector.name}"
        wanted = {matcher.name for matcher in selector.matchers.matchers}
        assert wanted <= shown[selector.name] | LABELS_OF_PROMETHEUS, f"{where}: {wanted}"


def test_every_number_that_there_is_has_a_place_in_the_dashboard(
    shown: dict[str, set[str]],
) -> None:
    text = json.dumps(DASHBOARD)

    missing = {name for name in shown if name not in text}
    assert missing <= {"fairturn_customer_running_documents"}


def test_legends_name_labels_that_there_are(shown: dict[str, set[str]]) -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            (selector, *_) = selectors(
                promql_parser.parse(target["expr"].replace("$job", "fairturn"))
            )
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert label in shown[selector.name], panel["title"]


def test_every_alert_says_what_is_wrong_and_how_bad_it_is() -> None:
    for group in ALERTS["groups"]:
        for rule in group["rules"]:
            assert rule["annotations"]["summary"].endswith("."), rule["alert"]
            assert rule["labels"]["severity"] in ("critical", "warning"), rule["alert"]
            assert rule["for"], rule["alert"]


def test_panels_have_a_place_of_their_own() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
