"""Errors by culprit: the client's (`RequestError`) and ours of the moment (`UnavailableError`). Anything else is a bug.

Both carry only text that a client may read, and are mapped to a protocol's form once, at that protocol's rim.
"""


class RequestError(Exception):
    """The request is wrong and stays wrong. `param` names the culprit; `status` is its HTTP status."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status


class UnavailableError(Exception):
    """The request is fine; somewhere else, or `retry_after_s` seconds later, it may work."""

    def __init__(self, message: str, retry_after_s: float = 1.0, status: int = 503, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s
        self.status = status
        self.code = code


class ConfigError(ValueError):
    """A setting, or a file of the model, that this system cannot run with. The message names it and the remedy."""
