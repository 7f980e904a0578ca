"""The priority rule in applications that use another queue. No other package imports this one."""
