"""KV transfer between GPUs of one host. Experimental: no GPU has run it yet."""
