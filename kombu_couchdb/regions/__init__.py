"""Regions: tasks that are published for another CouchDB, on parcels that CouchDB replicates.

`region` and `lent` define the documents, `region_views` the views, and `other_regions` is how a connection publishes.
Operators use `region_status`. `celery_couchdb.regions` has the part of the workers.
"""
