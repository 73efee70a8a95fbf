"""The fleet: the consumers of a database, which find its messages and share them without asking each other.

`attention` decides whether a consumer follows the changes feed or rests, `notifier` reports what is new, `candidates`
keeps the messages that could be claimed, and `claim_order` says which consumer may claim one first. `coordination`
reads what consumers know of each other.
"""
