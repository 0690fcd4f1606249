"""Model definitions: what a Hugging Face directory says, and the forward pass it describes."""
