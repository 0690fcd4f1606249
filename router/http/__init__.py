"""The HTTP interface: routes, authentication, request bodies and responses."""
