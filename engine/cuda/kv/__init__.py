"""KV of GPUs: memory that processes of one host share, and the channels over it. Experimental."""
