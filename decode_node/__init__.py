"""The decode role: a decode node receives the KV of prompts and generates tokens. It can also compute prompts."""
