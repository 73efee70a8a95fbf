"""What `make demo` runs: real workers, real work, a worker that is killed, and a table of what became of it all."""
