"""The router: serves the REST API, and owns each request from its first byte to its last. It never imports torch."""
