"""``cogfsctl``, the command line, on the client alone."""
