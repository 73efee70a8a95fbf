"""What the documents look like and what may happen to them: pure functions, without input or output.

It imports no other folder. Every folder but `couchdb` may import it.
"""
