"""Functions for operators, one subject per module. They return data and print nothing.

This folder may import `leases`, `queues`, `documents`, `couchdb` and `design`. `celery_couchdb.cli` and
`celery_couchdb.jobs` import it.
"""
