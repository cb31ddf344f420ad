"""The command line and the SDK against a daemon that runs for real."""
