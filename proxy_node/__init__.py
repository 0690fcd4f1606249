"""A node whose engine is a vLLM or SGLang server. It serves Baton's node protocol, and calls the server over HTTP."""
