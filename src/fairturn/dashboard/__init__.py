"""The page: who is served and why, in the reader's language, and the means to act on it.

`mounting.install` adds it to the application of the service. HTML is made here, of templates that
escape everything; scripts only replace blocks that have changed (decision 0040).

    mounting, visitors, sessions    routes and files; who looks, and what they may see
    rendering, tongue, texts        templates; numbers, durations and words in a language
    faces, trail, directory         a customer's colour; what happened lately; all customers
    charts, comparing, streaming    drawings; a demo in three orders; word that something changed
    rules, now, documents, searching, listing, customers, own, whatif    one page each
"""
