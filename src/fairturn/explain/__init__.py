"""Why a document waits: the snapshot, its analysis, reason codes, and their text."""
