"""The report: one file without external resources, a table below every chart, all input escaped."""

import re
from html.parser import HTMLParser

import pytest

from fairturn.simulator import workloads
from fairturn.simulator.charts.rows import LABELS, RIGHT, WAITING, WIDTH, Band, Timeline, strip
from fairturn.simulator.charts.svg import safe
from fairturn.simulator.comparison import Comparison, Discipline, compare, modes_of
from fairturn.simulator.plan import Outage, Plan
from fairturn.simulator.report import page
from fairturn.simulator.summary import headline, sentences
from tests.test_simulator import SECOND, scenario, trace_of

ATTACKS = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onload='alert(1)",
    "</style></title></svg><b>",
    "&lt;b&gt;",
    "\u202ereversed\u0007",
]
VOID = {"meta"}


class Checked(HTMLParser):
    """Finds unclosed elements, and elements that the report may not have."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parsed(html: str) -> Checked:
    checked = Checked()
    checked.feed(html)
    checked.close()
    assert checked.open == []
    return checked


@pytest.fixture(scope="module")
def weights() -> Comparison:
    return compare(workloads.make("weights"), list(Discipline))


def hostile() -> Comparison:
    rows = [(n % 3, name, 1) for n in range(5) for name in ATTACKS]
    return compare(scenario(trace_of(*rows), Plan(workers=1)), list(Discipline))


def test_the_report_loads_nothing_and_runs_nothing(weights: Comparison) -> None:
    html = page(weights)

    checked = parsed(html)
    tags = {tag for tag, _ in checked.tags}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "form", "base"}
    assert not re.search(r"https?:|url\(|@import|javascript:", html)
    names = {name for _, attributes in checked.tags for name in attributes}
    assert not any(name.startswith("on") or name in ("src", "href") for name in names)
    assert "default-src 'none'" in html


def test_every_picture_has_words_for_those_who_do_not_see_it(weights: Comparison) -> None:
    html = page(weights)

    pictures = re.findall(r"<svg .*?</svg>", html, re.DOTALL)
    assert len(pictures) >= 12
    for picture in pictures:
        assert 'role="img" aria-label="' in picture
        assert re.search(r"<title>.+</title>\n<desc>.+</desc>", picture)


def test_every_figure_has_a_table_under_it(weights: Comparison) -> None:
    html = page(weights)

    figures = re.findall(r"<figure>.*?</figure>", html, re.DOTALL)
    assert len(figures) == 3 + 6 + 3  # groups, modes that claim, groups
    for figure in figures:
        assert figure.index("<svg") < figure.index("<table ")
        assert '<th scope="col">' in figure
        assert '<th scope="row">' in figure


def test_the_page_is_made_for_light_dark_and_paper(weights: Comparison) -> None:
    html = page(weights)

    assert "@media (prefers-color-scheme: dark)" in html
    assert "@media print" in html
    assert '<html lang="en">' in html


def test_the_numbers_of_every_mode_and_group_stand_in_the_tables(weights: Comparison) -> None:
    text = "\n".join(parsed(page(weights)).text)

    for result in weights.results:
        for group in result.groups:
            assert f"{group.waits.p99_us / SECOND:,.1f}" in text


def test_nothing_from_outside_becomes_markup() -> None:
    html = page(hostile())

    checked = parsed(html)
    assert not {tag for tag, _ in checked.tags} & {"script", "img", "b"}
    assert not any(name.startswith("on") for _, attributes in checked.tags for name in attributes)
    text = "".join(checked.text)
    assert ATTACKS[0] in text
    assert ATTACKS[4] in text
    assert "\u202e" not in html
    assert "\u0007" not in html


def test_text_that_steers_is_replaced() -> None:
    assert safe("a\u202eb\x1b<") == "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}&lt;"


def test_a_block_is_taller_the_better_its_level_is_and_waiting_is_a_thin_line() -> None:
    picture = strip("t", [Band("g", [Timeline("a", [1, 1, 0, 9, WAITING])])], 100 * SECOND, "d")

    def height(style: str) -> float:
        found = re.search(rf'class="{style}" d="M[\d.]+ [\d.]+h[\d.]+v([\d.]+)', picture)
        assert found is not None
        return float(found[1])

    assert height("level-1") > height("level-9") > height("waits")


def test_a_customer_who_waits_unserved_is_seen_as_such() -> None:
    rows = [(0, "dump", 10)] * 30 + [(15, "quiet", 1)]
    made = compare(scenario(trace_of(*rows), Plan(workers=1)), [Discipline.FIFO])

    text = page(made)

    found = re.search(r"quiet: served in (\d+)% of the time, waited unserved in (\d+)%", text)
    assert found is not None
    assert int(found[1]) <= 1
    assert int(found[2]) >= 90


# ── Kinds of work and outages ────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def with_an_outage() -> Comparison:
    rows = [(n, name, 2) for n in range(90) for name in ("bulk", "quiet")]
    trace = trace_of(*rows, kinds=["ocr", "text"] * 90)
    outage = Outage((0,), 30 * SECOND, 60 * SECOND)
    plan = Plan(workers=2, workers_for=((1, 1),), kind_limits={0: 2}, outages=(outage,))
    made = scenario(trace, plan)
    return compare(made, modes_of(made))


def test_kinds_have_a_figure_each_and_workers_and_outages_a_table(
    with_an_outage: Comparison,
) -> None:
    html = page(with_an_outage)

    figures = re.findall(r"<figure>.*?</figure>", html, re.DOTALL)
    assert len(figures) == 2 + 2 + 6 + 2  # groups, kinds, modes that claim, groups
    text = "\n".join(parsed(html).text)
    for title in ("Kinds of work", "Outages", "Outage of ocr from 30 s to 60 s"):
        assert title in text
    for result in with_an_outage.results:
        assert f"{result.outages[0].recovery_us / SECOND:,.1f}" in text
        for kind in result.kinds:
            assert f"{kind.waits.p99_us / SECOND:,.1f}" in text
        for load in result.loads:
            assert f"{load.busy:.0%}" in text
    assert "3 workers (1 for text, 2 for all kinds)" in text
    assert "limit of kind ocr" in text
    assert "behind" not in text


def test_dead_documents_stand_beside_their_outage() -> None:
    outage = Outage((0,), 0, 4_000 * SECOND)
    made = scenario(trace_of(*[(0, "bulk", 10)] * 9), Plan(workers=2, outages=(outage,)))
    comparison = compare(made, [Discipline.LEVELS])

    (row,) = re.findall(
        r'<th scope="row">levels</th>(.*?)</tr>',
        page(comparison).split("<h2>Outages")[1].split("</section>")[0],
    )

    dead = comparison.results[0].all.dead
    assert dead > 0
    assert row.endswith(f"<td>{dead}</td>")


def test_an_outage_is_a_shaded_band_over_all_customers(with_an_outage: Comparison) -> None:
    html = page(with_an_outage)

    ends_s = max(result.ends_at for result in with_an_outage.results) / SECOND
    bands = re.findall(r'<rect class="shade" x="([\d.]+)" y="0" width="([\d.]+)"', html)
    assert len(bands) == 6
    for x, width in bands:
        begin = (float(x) - LABELS) / (WIDTH - RIGHT - LABELS)
        assert begin == pytest.approx(30 / ends_s, abs=0.001)
        share = float(width) / (WIDTH - RIGHT - LABELS)
        assert share == pytest.approx(30 / ends_s, abs=0.001)


def test_without_kinds_and_outages_the_page_names_neither(weights: Comparison) -> None:
    text = "\n".join(parsed(page(weights)).text)

    assert "Kinds of work" not in text
    assert "utage" not in text


# ── In words ─────────────────────────────────────────────────────────────────────────────────────


def test_the_headline_names_the_group_that_gains_most_and_how_much() -> None:
    rows = [(0, "dump", 1)] * 400 + [(n, "quiet", 1) for n in range(1, 300, 5)]
    made = scenario(trace_of(*rows), Plan(workers=1))

    said = headline(compare(made, [Discipline.LEVELS, Discipline.FAIR]))

    assert re.fullmatch(
        r"quiet: 99 of 100 documents waited at most [\d.]+ s in fair, "
        r"and [\d.]+ s in levels: [\d.,]+ times as long\.",
        said,
    )


def test_one_mode_alone_is_told_without_a_comparison() -> None:
    made = compare(scenario(trace_of((0, "a", 1)), Plan()), [Discipline.FIFO])

    assert headline(made) == "In fifo, 99 of 100 documents waited at most 0.0 s."


def test_the_words_say_who_pays_and_where_workers_were_idle() -> None:
    rows = [(0, "dump", 1)] * 90 + [(n, "quiet", 1) for n in range(0, 80, 5)]
    free = scenario(trace_of(*rows), Plan(workers=1))
    limited = scenario(trace_of(*rows), Plan(workers=2, limits={0: 1}))
    modes = [Discipline.FAIR, Discipline.FIFO, Discipline.IDEAL]

    said, with_limit = (" ".join(sentences(compare(made, modes))) for made in (free, limited))

    assert re.search(r"Longer mean waits in fair: dump by \d+% against fifo", said)
    assert "Furthest behind ideal, in documents of one customer: " in said
    assert "No worker was idle while a document waited, in any mode." in said
    assert "Workers were idle while documents waited, because of concurrency limits" in with_limit


def test_the_ideals_alone_can_be_told_too() -> None:
    made = compare(scenario(trace_of((0, "a", 1)), Plan()), [Discipline.IDEAL])

    assert sentences(made)
    assert "<h2>Service over time" not in page(made)
