"""Which document is next, and when: flows, turns, queue positions, forecasts. No I/O."""
