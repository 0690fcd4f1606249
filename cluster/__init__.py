"""The `baton` command. It starts, watches, checks and queries a cluster."""
