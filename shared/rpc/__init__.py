"""The control plane: messages, codec, methods and connections."""
