"""A CouchDB client without knowledge of queues: requests, nodes, authentication, server time, changes feed.

This package imports no other folder. Every folder except `documents` may import it.
"""
