"""REST in, tokens out: the router owns requests from the client's first byte to the last. It never imports torch."""
