"""A node whose engine is a vLLM or SGLang server: it serves Baton's node protocol and calls the server over HTTP."""
