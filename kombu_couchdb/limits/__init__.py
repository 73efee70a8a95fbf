"""Limits that all consumers of a database share: concurrency limits and rates.

`gate` is the interface. It admits messages to be claimed, or parks them until there is a permit for them: a slot
of their concurrency key, a start of their rate key (`permits`), or both.
"""
