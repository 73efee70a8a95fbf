"""Canvas, results and values: what users of Redis see, and what users of CouchDB see."""
