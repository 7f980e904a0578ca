"""The traffic that shows the point: one customer's dump beside quiet customers."""
