"""The load generator and its traffic."""
