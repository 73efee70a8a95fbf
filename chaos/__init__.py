"""Proof that the promises hold: real workers and publishers, while processes, network and server fail. `make chaos`.

`plan` decides what is sent and what fails when, from a seed. `publisher` and `tasks` are the processes that send and work; they
write down what happens in a `ledger`. `faults` break things, `run` conducts, and `verdict` judges what the ledger says.
"""
