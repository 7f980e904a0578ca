"""`fairturn explain`: why a document waits, its queue position and its expected start."""

import os
from typing import TYPE_CHECKING, Any

import click

from fairturn.cli.exit_codes import misuse_is_wrong_use
from fairturn.cli.options import Flags
from fairturn.cli.target import place_options, reached
from fairturn.cli.terminal import print_line, printable

if TYPE_CHECKING:
    from fairturn.explain.analysis import Explanation

AUDIENCES = ("operator", "customer")


@click.command("explain")
@click.argument("id")
@click.option("--lang", metavar="LANGUAGE", help="en, de, es, pl or pt; the locale's by default.")
@click.option(
    "--for",
    "audience",
    type=click.Choice(AUDIENCES),
    default=AUDIENCES[0],
    help="The audience; `customer` hides the names of other customers.",
)
@place_options
def command(*, id: str, lang: str | None, audience: str, as_json: bool, flags: Flags) -> None:
    """Explain why a document waits, and when it will start.

    For a document that runs or has ended, explain what happened.

    \b
    fairturn explain 0c2f1d4b5a69788
    fairturn explain 0c2f1d4b5a69788 --lang de --for customer
    """
    from fairturn.explain.sentences import tell
    from fairturn.i18n import load, preferred

    language = preferred(os.environ) if lang is None else lang
    with misuse_is_wrong_use():
        load(language)
    with reached(flags) as queue:
        explanation = queue.explain(id, audience)
        sentences = tell(explanation, language)
    if as_json:
        print_line({**_as_json(explanation), "language": language, "sentences": sentences})
    else:
        for sentence in sentences:
            click.echo(printable(sentence))


def _as_json(explanation: "Explanation") -> dict[str, Any]:
    position, forecast = explanation.position, explanation.forecast
    return {
        "id": explanation.id,
        "at": explanation.at_us,
        "state": explanation.state,
        "priority": explanation.priority,
        "count": explanation.count,
        "position": None
        if position is None
        else {
            **position.bounds._asdict(),
            "before": position.before._asdict(),
            "reached": position.reached,
            "causes": position.causes,
        },
        "forecast": None
        if forecast is None
        else {"earliest_at": forecast.earliest_at_us, "latest_at": forecast.latest_at_us},
        "reasons": [{"code": reason.code, **reason.parameters} for reason in explanation.reasons],
    }
