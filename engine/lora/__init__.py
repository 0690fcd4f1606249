"""LoRA adapters: low-rank updates of a model's matrices, which each request chooses."""
