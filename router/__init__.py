"""The router serves the REST API, and keeps each request until its answer is complete. It never imports torch."""
