"""Results as documents: how they look, every request about them, how they expire, and the relay of a prefork pool.

It may import `kombu_couchdb`. The backend, `waiting` and `chords` import it.
"""
