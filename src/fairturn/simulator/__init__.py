"""The real rule and the real order of service on a simulated clock."""
