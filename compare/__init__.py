"""Comparison of ways to serve the same traffic on the same devices: which is better, with what confidence, and why."""
