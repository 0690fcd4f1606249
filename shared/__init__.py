"""What two processes must agree on: messages, codec, RPCs, registry, errors, settings, KV channels."""
