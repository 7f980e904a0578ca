"""Stores of documents, counts and turns. A new store is one module or package here that fulfils
`fairturn.stores.contract` and passes `fairturn.stores.conformance`."""
