"""Results: their documents, the requests for them, their conflict rules, and the relay of a prefork pool.

It may import `kombu_couchdb`. The backend, `waiting` and `chords` import it.
"""
