"""The Celery result backend for Apache CouchDB: `result_backend = 'couchdb://user:password@host:5984/celery_results'`."""
