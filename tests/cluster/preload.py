"""Imported by the fork server: everything that routers and nodes import."""

import gc

import decode_node.__main__
import prefill_node.__main__
import router.__main__

MODULES = (decode_node.__main__, prefill_node.__main__, router.__main__)
gc.freeze()  # a collection in a child would copy every page
