"""Pure decisions: which tokens run next, which blocks hold them, which node takes a request.

Standard library only; no clock, no I/O, no randomness. Drivers (the engine, the simulator) do what is decided here.
"""
