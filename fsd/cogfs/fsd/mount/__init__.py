"""The mount worker: one process that passes one directory through FUSE and notes what changes in it.

It knows nothing of snapshots, threads or the store; what it tells the control process is in ``cogfs.fsd.channel``.
"""
