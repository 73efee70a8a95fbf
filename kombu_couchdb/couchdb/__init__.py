"""A client of CouchDB that knows no queues: requests, nodes, authentication, the server's time, the feed of changes.

It imports no other folder. Every folder but `documents` may import it.
"""
