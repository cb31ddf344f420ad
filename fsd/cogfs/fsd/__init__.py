"""The daemon: the control process, the mount workers, and the channel between them."""
