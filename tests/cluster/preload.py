"""Import all modules of routers and nodes, the compiled kernels and transformers into the fork server.

A node then starts without importing them. Loading the kernels alone takes 2 s of CPU time.
"""

import gc

gc.disable()  # because garbage collections would take a third of the import time

import decode_node.__main__  # noqa: E402
import engine.foreign.vision  # noqa: E402
import prefill_node.__main__  # noqa: E402
import proxy_node.__main__  # noqa: E402
import router.__main__  # noqa: E402
from engine.cpu import why_not_compiled  # noqa: E402

if not why_not_compiled():
    import engine.cpu.attention
    import engine.cpu.draw
    import engine.cpu.fused_decode
    import engine.cpu.layer
    import engine.cpu.panels

MODULES = (decode_node.__main__, prefill_node.__main__, proxy_node.__main__, router.__main__, engine.foreign.vision)
gc.freeze()  # otherwise a garbage collection in a child would copy every page
gc.enable()
