"""The endpoint picker, which chooses routers for an Envoy gateway. This package needs the extra `picker`."""
