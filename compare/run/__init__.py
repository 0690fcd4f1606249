"""Runs the trials of an experiment against its arms and keeps the measurements."""
