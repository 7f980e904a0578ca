"""The style sheet of the report: light and dark, screen and print."""

from fairturn.priority import LEVELS


def _levels(lightness: int, saturation: int) -> str:
    """Return colours from blue for level 1 over purple to red for level 9."""
    lines = []
    for level in range(1, LEVELS + 1):
        hue = 212 + (level - 1) * (366 - 212) / (LEVELS - 1)
        lines.append(f"  --level-{level}: hsl({hue:.0f} {saturation}% {lightness}%);")
    return "\n".join(lines)


STYLE = f"""\
:root {{
  color-scheme: light dark;
  --paper: #ffffff; --page: #f5f6f8; --ink: #16202c; --soft: #566472; --line: #dde2e8;
  --main: #1b66d1; --other: #b9c2cd; --ideal: #ffffff; --ideal-line: #8b97a5; --waits: #e08a1e;
{_levels(50, 66)}
}}
@media (prefers-color-scheme: dark) {{
  :root {{
    --paper: #18202a; --page: #10161d; --ink: #e8edf3; --soft: #9fadbb; --line: #2c3846;
    --main: #5b9df5; --other: #4d5b6b; --ideal: #18202a; --ideal-line: #8b97a5; --waits: #f0a848;
{_levels(64, 72)}
  }}
}}
* {{ box-sizing: border-box; }}
body {{
  margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
}}
main {{ max-width: 1160px; margin: 0 auto; padding: 40px 20px 64px; }}
header {{ margin-bottom: 28px; }}
.kind {{ margin: 0; color: var(--soft); font: 14px ui-monospace, Menlo, Consolas, monospace; }}
h1 {{ margin: 6px 0 14px; font-size: 34px; line-height: 1.15; letter-spacing: -0.01em; }}
h2 {{ margin: 0 0 6px; font-size: 22px; }}
.headline {{
  margin: 0; padding: 16px 20px; border-left: 5px solid var(--main); border-radius: 4px;
  background: var(--paper); font-size: 20px; line-height: 1.4;
}}
section {{
  margin: 0 0 24px; padding: 24px 28px; background: var(--paper);
  border: 1px solid var(--line); border-radius: 10px;
}}
section > p {{ margin: 0 0 16px; color: var(--soft); max-width: 78ch; }}
ul {{ margin: 10px 0 0; padding-left: 20px; }}
li {{ margin: 5px 0; max-width: 95ch; }}
figure {{ margin: 22px 0 0; }}
figcaption {{ margin-bottom: 6px; font-weight: 650; }}
svg {{ display: block; width: 100%; height: auto; overflow: visible; }}
svg text {{ font-size: 12px; fill: var(--ink); }}
svg .axis {{ fill: var(--soft); font-size: 11.5px; }}
svg .name {{ font-size: 12px; }}
svg .group {{ font-weight: 650; }}
svg .value {{ font-weight: 650; font-variant-numeric: tabular-nums; font-size: 13px; }}
.rule {{ stroke: var(--line); fill: none; stroke-width: 1; }}
.tick {{ stroke: var(--line); fill: none; stroke-width: 1; stroke-dasharray: 2 4; }}
.waits {{ fill: var(--waits); }}
.spread {{ fill: var(--main); opacity: 0.45; }}
.mark {{ fill: var(--ink); stroke: var(--paper); stroke-width: 1.5; }}
.bar {{ rx: 3px; }}
.bar.main {{ fill: var(--main); }}
.bar.other {{ fill: var(--other); }}
.bar.ideal {{ fill: var(--ideal); stroke: var(--ideal-line); stroke-dasharray: 4 3; }}
{"".join(f".level-{n} {{ fill: var(--level-{n}); }} " for n in range(1, LEVELS + 1))}
details {{ margin-top: 10px; }}
summary {{ cursor: pointer; color: var(--soft); font-size: 14px; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; width: 100%; margin-top: 6px; font-size: 13.5px; }}
th, td {{
  padding: 4px 10px; text-align: right; border-bottom: 1px solid var(--line);
  font-variant-numeric: tabular-nums; white-space: nowrap;
}}
th {{ font-weight: 600; color: var(--soft); }}
th:first-child {{ text-align: left; color: var(--ink); }}
.words td, .words th {{ text-align: left; white-space: normal; }}
@media (max-width: 800px) {{
  main {{ padding: 24px 10px 40px; }}
  section {{ padding: 18px 14px; }}
  h1 {{ font-size: 27px; }}
  .headline {{ font-size: 18px; }}
  .picture {{ overflow-x: auto; }}
  .picture svg {{ min-width: 760px; }}
}}
@media print {{
  body {{ background: none; font-size: 11px; }}
  main {{ max-width: none; padding: 0; }}
  section {{ border: 0; padding: 0 0 12px; }}
  .scroll, .picture {{ overflow: visible; }}
  .picture svg {{ min-width: 0; }}
  table {{ font-size: 9.5px; }}
  th, td {{ padding: 1px 4px; }}
  svg, tr {{ break-inside: avoid; }}
  h2, figcaption, summary {{ break-after: avoid; }}
  details::details-content {{ content-visibility: visible; display: block; }}
  svg, .bar, path {{ print-color-adjust: exact; -webkit-print-color-adjust: exact; }}
}}
"""
