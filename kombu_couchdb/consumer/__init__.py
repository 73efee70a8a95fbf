"""The I/O thread of a consuming connection: it claims messages and writes what kombu decides about them.

It may import `fleet` and what is below, but none of kombu's classes. `transport` imports it.
"""
