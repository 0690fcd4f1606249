"""Metrics, statistics and the verdict. This package has no I/O and reads no clock."""
