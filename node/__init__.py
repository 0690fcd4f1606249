"""Code that prefill and decode nodes share: the process, its RPCs, router sessions and request bookkeeping."""
