"""Tests of the whole: a real daemon, real mounts, the client and the command line."""
