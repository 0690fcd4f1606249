"""Measure Baton against its goals and against other servers. Results are kept in results/."""
