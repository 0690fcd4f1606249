"""Scheduling decisions: which tokens run next, which blocks hold them, and which node takes a request.

This package uses only the standard library and has no clock, I/O or randomness. The engine and the simulator carry
out its decisions.
"""
