"""The HTTP service: the queue for those who are on another machine, or speak another language.

`app.make_app` makes it of a queue; `server.py` has the server of `fairturn serve` and `up`. Work
on the store happens in threads; the event loop only moves bytes and waits (decision 0030).

    connections, guarding, callers, rates    around every request: limits; who asks, from the key
    submitting, lines, uploads, forms, collecting    documents as they come in
    documents, changing, room, customers, operating, keyring    routes, by their noun
    health, metrics, pages          the same, about the service itself
    shapes, responses, problems, languages, logs    what goes over the wire, and into the log
    watching, events                one thread that waits for changes, for all who wait
    service, plan                   what every request needs; what the process was told
"""
