"""The command line: what it prints, what it refuses, and its reference."""
