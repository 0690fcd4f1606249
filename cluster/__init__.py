"""The `baton` command: starts, watches and talks to a cluster on one machine."""
