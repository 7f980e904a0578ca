"""SVG charts of the web page and of the simulator's report: no library, no script, no network.

No chart relies on colour alone, and each stands beside a table with the same values.

    svg       shapes, labels, escaping, a logarithmic scale
    series    values over time: waits, a customer's count
    rows      a row for each customer or mode: strips, spreads, bars
"""
