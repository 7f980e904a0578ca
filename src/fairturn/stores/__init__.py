"""Where documents, counts and turns are kept. To add a store: write one module here that keeps
the promises of `fairturn.stores.contract`, and run `fairturn.stores.conformance` on it."""
