"""KV transfer between GPUs of one host. Experimental: it has not run on a GPU yet."""
