"""The chaos suite, `make chaos`: workers and publishers while processes, network and server fail.

From a seed, `plan` decides what is sent and what fails when. `publisher` and `tasks` are the processes that send and
run tasks; they record events in a `ledger`. `faults` break things, `run` conducts the run, and `verdict` judges the
ledger.
"""
