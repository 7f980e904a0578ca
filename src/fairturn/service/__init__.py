"""The HTTP service: a queue for clients on other machines or in other languages.

`app.make_app` builds the application for a queue; `server.py` runs it for `fairturn serve` and
`up`. Store calls run in threads; the event loop only moves bytes and waits (decision 0022).

    server, middleware, callers, rates                every request: limits, authentication
    concurrency, polls, downloads, scan               at most N at a time; what waits or takes long
    submissions, ndjson, forms, uploads, batcher      submitting documents
    documents, room, customers, kinds, administration, access_keys, events   the other routes
    health, metrics, api_docs                         routes about the service itself
    shapes, responses, problems, languages, logs      JSON, errors, the access log
    change_feed                                       one thread that polls the store for changes
    service, options                                  what requests share; limits
"""
