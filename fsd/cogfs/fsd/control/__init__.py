"""The control process: the API, the workspaces, snapshots, restores and the workers' supervisor."""
