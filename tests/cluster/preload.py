"""Import all modules of routers and nodes into the fork server."""

import gc

import decode_node.__main__
import prefill_node.__main__
import proxy_node.__main__
import router.__main__

MODULES = (decode_node.__main__, prefill_node.__main__, proxy_node.__main__, router.__main__)
gc.freeze()  # otherwise a garbage collection in a child would copy every page
