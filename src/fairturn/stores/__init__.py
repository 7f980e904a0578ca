"""Where documents, counts and turns are kept. To add a store: write one module here that keeps
the promises of `fairturn.store`, and run `fairturn.testing` on it."""
