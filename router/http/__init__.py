"""The HTTP edge: routes, authentication, request bodies, responses."""
