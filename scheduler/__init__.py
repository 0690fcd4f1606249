"""Scheduling decisions: which tokens run next, which blocks hold them, and which node takes a request.

This package uses only the standard library. It reads no clock, does no I/O and uses no randomness. The engine and the
simulator carry out its decisions.
"""
