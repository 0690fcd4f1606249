"""KV on GPUs: memory that processes of one host share, and the channels that use it. Experimental."""
