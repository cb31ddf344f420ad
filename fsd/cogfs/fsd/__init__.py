"""The daemon: the control process and the mount workers."""
