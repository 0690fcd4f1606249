"""Runs the scheduler's steps on a device: models, attention over paged KV, and sampling."""
