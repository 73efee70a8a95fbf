"""The optional rooms of the broker. The house knows them by `kombu_couchdb.rooms` alone."""
