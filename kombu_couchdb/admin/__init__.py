"""Operators' functions, one task a module: each returns data and prints nothing.

It may import `leases`, `queues`, `documents`, `couchdb` and `design`. `celery_couchdb.cli` and `celery_couchdb.jobs` import it.
"""
