"""The pool of nodes: connections to them, their health, their load and their status."""
