"""The I/O thread of a consuming connection: claims, bodies, what is not acknowledged yet, and what is to be written about it.

It may import `leases`, `queues`, `documents`, `couchdb` and `design`, but nothing of kombu's classes. `transport` imports it.
"""
