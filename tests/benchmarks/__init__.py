"""Benchmarks beside kombu's other transports and bare CouchDB: `make bench`.

`python -m tests.benchmarks --help` lists the options.

::

    __main__ ──► run ──► measures/*  ──► peers, loops ──► systems/*   one module per measure, one per system
        └──────► report ──► table, plot, figures                      pure: results in, text out

A *system* is a broker with its result backend. A *place* is a fresh queue or database on a system. A *case* is measured
once in each round on each system and gives one or more *figures*.
"""
