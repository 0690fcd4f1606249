"""Compares ways to serve the same traffic on the same devices: finds which is better, how certain that is, and why."""
