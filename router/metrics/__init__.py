"""Prometheus metrics of requests and nodes."""
