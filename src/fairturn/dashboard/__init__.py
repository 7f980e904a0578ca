"""The web page: the state of the queue in the reader's language, and actions on it.

`routes.install` adds it to the application of the service. The server renders HTML from templates
that escape all values; scripts only replace blocks that have changed (decision 0025).

    routes, visitors, login           routes and static files; sessions and roles
    renderer, language, texts         templates and avatars; numbers and durations; labels
    samples, failures, customer_index recent activity; failed documents; all customers
    stream                            change notifications
    now, documents, document_list, search, customers, customer_page   the pages
    kinds, whatif, rules, demo        more pages
"""
