"""The control process with real workers, real mounts and the API over its socket."""
