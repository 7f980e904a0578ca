"""`fairturn rule`: the rule, or its counts and priorities for N documents."""

from collections.abc import Mapping
from typing import Any

import click

from fairturn.cli.exit_codes import wrong_use
from fairturn.cli.options import SECONDS, rule_of, rule_options
from fairturn.cli.target import reached
from fairturn.cli.terminal import plain_number, print_line
from fairturn.clock import SECOND_US, microseconds
from fairturn.priority import LEVELS, Count, Reset, Rule

DOCUMENTS_MAX = 1_000_000
_SINCE = {
    Reset.IDLE: "the customer's last document",
    Reset.PERIODIC: "the last reset of the customer's count",
}


@click.command("rule")
@rule_options
@click.option(
    "-d", "--database", type=click.Path(), metavar="FILE", help="Print the rule of this queue."
)
@click.option("--url", metavar="URL", help="Print the rule of this service.")
@click.option(
    "--documents",
    type=click.IntRange(1, DOCUMENTS_MAX),
    metavar="N",
    help="Print the count and priority of each of N documents of one customer.",
)
@click.option("--every", type=SECONDS, help="Interval between them; 0 by default, a burst.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    *,
    rule_given: Mapping[str, Any],
    database: str | None,
    url: str | None,
    documents: int | None,
    every: float | None,
    as_json: bool,
) -> None:
    """Print the priority rule, or the priorities of N documents.

    Without options, it is the default rule; with --database or --url, that of a queue.

    \b
    fairturn rule
    fairturn rule --database documents.db
    fairturn rule --documents 30 --every 60
    """
    if every is not None and documents is None:
        wrong_use("--every needs --documents, the number of documents")
    if database is None and url is None:
        rule = rule_of(rule_given)
    elif not rule_given:
        with reached({"database": database, "url": url}) as queue:
            rule = queue.rule
    else:
        wrong_use(
            f"--{'url' if database is None else 'database'} prints the rule of that queue; "
            "leave out --reset, --reset-interval and --bounds"
        )
    if documents is not None:
        _print_documents(rule, documents, microseconds(every or 0), as_json)
    elif as_json:
        print_line(_as_json(rule))
    else:
        _print_rule(rule)


def _as_json(rule: Rule) -> dict[str, Any]:
    return {
        "reset": rule.reset,
        "reset_interval_s": rule.reset_interval_us / SECOND_US,
        "bounds": rule.bounds,
        "priorities": [
            *(
                {"priority": priority, "count_less_than": rule.bounds[priority - 2]}
                for priority in range(LEVELS, 1, -1)
            ),
            {"priority": 1, "count_at_least": rule.bounds[0]},
        ],
    }


def _print_rule(rule: Rule) -> None:
    interval = rule.reset_interval_us / SECOND_US
    minutes = f" ({plain_number(interval / 60)} minutes)" if interval >= 60 else ""
    lines = [
        "The document priority system",
        "",
        "Pending documents count: starts at 0 and decreases by one with each document",
        "  that the customer submits.",
        f"Reset interval: {plain_number(interval)} seconds{minutes}. When more has passed",
        f"  since {_SINCE[rule.reset]}, the count is 0 again.",
        "",
        "Priority levels, from 1 (served first) to 9 (served last):",
        "",
    ]
    for priority in range(LEVELS, 1, -1):
        bound = rule.bounds[priority - 2]
        lines.append(f"  Priority {priority}: pending documents count less than {bound}")
    lines.append(f"  Priority 1: pending documents count greater than or equal to {rule.bounds[0]}")
    click.echo("\n".join(lines))


def _print_documents(rule: Rule, documents: int, every_us: int, as_json: bool) -> None:
    # Printed line by line, so that a closed pipe ends a long table early.
    columns = ("document", "after (s)", "pending documents count", "priority")
    widths = [len(column) for column in columns]
    if not as_json:
        click.echo("  ".join(columns))
    last: Count | None = None
    for n in range(documents):
        at = n * every_us
        last = rule.check(last, at)
        priority = rule.priority(last.value)
        if as_json:
            at_s = at / SECOND_US
            print_line({"document": n + 1, "at_s": at_s, "count": last.value, "priority": priority})
        else:
            cells = (str(n + 1), plain_number(at / SECOND_US), str(last.value), str(priority))
            click.echo("  ".join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True)))
