"""The endpoint picker. It chooses routers for an Envoy gateway. It needs `baton-serve[picker]`."""
