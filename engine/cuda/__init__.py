"""What only a CUDA device has: the runner with its static buffers and graphs, and memory that peers may map."""
