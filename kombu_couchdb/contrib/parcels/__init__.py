"""Parcels: tasks from publishers without access to the broker's database, and the databases in which they wait.

`parcel` defines the documents, `devices` the publishers that have a database of their own, and `parcel_channel` is how
a program publishes parcels. Operators use `stored_parcels` and `device_setup`. `celery_couchdb.contrib.parcels` moves
parcels to the broker's database.
"""
