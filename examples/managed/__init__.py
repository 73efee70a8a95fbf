"""A managed CouchDB service to try: a fake of IBM Cloudant, and a demo of workers behind its smallest plan."""
