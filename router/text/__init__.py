"""Conversion between text and token ids: the tokenizer, the chat template and the model's files."""
