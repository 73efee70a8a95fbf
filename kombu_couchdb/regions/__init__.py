"""Regions: tasks that are published for another CouchDB, on parcels that CouchDB replicates.

`region` defines the documents and the views, and `other_regions` is how a connection publishes. Operators use
`region_status`. `celery_couchdb.regions` has the part of the workers.
"""
