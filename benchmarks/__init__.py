"""Benchmarks that compare Baton with its goals and with other servers. results/ contains their results."""
