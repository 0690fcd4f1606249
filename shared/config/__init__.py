"""The settings of every process, and the command line that is built from them."""
