"""The endpoint picker. It chooses routers for an Envoy gateway. It needs the extra `picker`."""
