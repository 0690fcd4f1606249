"""Compares ways to serve the same traffic on the same devices: which one is best, why, and how certain that is."""
