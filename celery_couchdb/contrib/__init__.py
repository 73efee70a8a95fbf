"""The optional rooms of results, workers and commands. The house knows them by `celery_couchdb.rooms` alone."""
