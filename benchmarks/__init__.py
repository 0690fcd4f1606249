"""Benchmarks that compare Baton with its performance goals and with other servers. Their results are in results/."""
