"""Metrics, statistics and the verdict. Pure: no I/O and no clock."""
