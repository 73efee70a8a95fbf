"""Regions: tasks that run in another CouchDB.

`region` defines the documents and the rules, `records` finds and changes them for operators and programs, and
`other_regions` is how a connection publishes. `celery_couchdb.contrib.regions` has the part of the workers.
"""
