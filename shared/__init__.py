"""Code that several processes share: messages, codec, RPCs, registry, errors, settings and KV channels."""
