"""Comparison of ways to serve the same traffic on the same devices: which is better, how certain that is, and why."""
