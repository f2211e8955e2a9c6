"""The training loop of the command line, and the record it leaves."""
