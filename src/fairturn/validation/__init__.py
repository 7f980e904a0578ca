"""Input from callers, checked and converted to the model."""
