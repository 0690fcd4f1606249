"""Worker scripts for `benchmarks.process.PeerProcess`, one per compared server, run by that server's interpreter."""
