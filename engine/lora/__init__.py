"""LoRA adapters: low-rank updates of a model's matrices. Each request can select one adapter."""
