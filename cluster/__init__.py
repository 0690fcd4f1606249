"""The `baton` command, which starts, watches, checks and queries a cluster."""
