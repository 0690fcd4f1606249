"""The load generator, and the traffic that it sends."""
