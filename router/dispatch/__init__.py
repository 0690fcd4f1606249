"""Admission, attempts and failover of requests."""
