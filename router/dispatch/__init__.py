"""Admission, placement attempts and failover of requests."""
