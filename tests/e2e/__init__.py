<<<<<<< HEAD
"""The command line and the SDK against a daemon that runs for real."""
=======
"""Tests of the whole: a real daemon, real mounts, the client and the command line."""
>>>>>>> e2e
