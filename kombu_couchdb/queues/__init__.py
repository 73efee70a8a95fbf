"""Requests about WorkItems, queues, exchanges, bindings and broadcasts.

It may import `documents`, `couchdb` and `design`. `leases`, `consumer`, `transport` and `admin` import it.
"""
