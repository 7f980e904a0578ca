"""The rule in apps that have a queue already. It imports fairturn, which never imports it."""
