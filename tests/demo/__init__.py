"""The main job on a real project: ``python -m tests.demo``."""
