"""The traffic of the demos: one customer's bulk upload beside quiet customers."""
