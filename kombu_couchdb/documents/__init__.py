"""The documents and their changes, as pure functions without input or output; `types` has their members.

It imports no other folder. Every folder but `couchdb` may import it.
"""
