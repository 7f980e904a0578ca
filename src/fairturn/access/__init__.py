"""Access keys: their values, and the registry that creates, checks, rotates and revokes them."""
