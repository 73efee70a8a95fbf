"""Pictures of the page of operators, for the README and for eyes: `make pictures`."""
