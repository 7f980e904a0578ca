"""The HTTP service: the queue for those who are on another machine, or speak another language.

`fairturn.service.app.make_app` makes it of a queue; `fairturn serve` and `fairturn up` run it. All
work on the store happens in threads; the event loop only moves bytes and waits (decision 0030).
"""
