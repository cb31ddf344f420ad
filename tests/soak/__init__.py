"""Long runs, by hand: ``python -m tests.soak.…``."""
