"""Comparison of ways to serve the same traffic on the same devices: what was better, how sure that is, and why."""
