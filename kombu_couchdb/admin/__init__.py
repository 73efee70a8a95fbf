"""What operators do, one task a module: each returns data and prints nothing."""
