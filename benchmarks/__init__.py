"""How fast it is, side by side with kombu's other transports and with bare CouchDB: `make bench`.

`python -m benchmarks --help` tells the options.

::

    __main__ ──► run ──► measures/*  ──► peers, loops ──► systems/*     one module for each measure, one for each system
        └──────► report ──► table, plot, figures                        pure: results in, text out

A *system* is a broker with its results; a *place* is a fresh queue or database on one; a *case* is what is measured once in
each round on each system, and gives one *figure* or several.
"""
