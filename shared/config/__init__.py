"""Settings of every process, and the command line made from them."""
