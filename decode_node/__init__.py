"""The role of a decode node: it receives the KV of prompts and generates tokens, and can also compute prompts."""
