"""Model definitions: the configuration in a Hugging Face directory, and the forward pass that it describes."""
