"""The demo, `make demo`: two workers, many tasks, a killed worker, and a table of the outcome."""
