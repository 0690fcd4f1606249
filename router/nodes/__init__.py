"""Connections to the nodes, and which of them take requests."""
