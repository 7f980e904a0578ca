"""Workers: claim documents, run a handler on each, record the outcomes."""
