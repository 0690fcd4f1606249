"""Imported by the fork server: everything that routers and nodes import."""

import gc

import router.__main__  # noqa: F401
from router.http.openapi import openapi

openapi()  # cached
gc.freeze()  # a collection in a child would copy every page
