"""Parcels: tasks from publishers without access to the broker's database, and the databases in which they wait.

`parcel` defines the documents and the views, and `parcel_channel` is how a program publishes parcels. Operators use
`stored_parcels`, `devices` and `replications`. `celery_couchdb.parcels` moves parcels to the broker's database.
"""
