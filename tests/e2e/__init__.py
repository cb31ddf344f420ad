"""The whole: a real daemon, real mounts, the SDK and the command line."""
