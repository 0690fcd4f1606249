"""Runs trials of an experiment against its arms and keeps what was measured."""
