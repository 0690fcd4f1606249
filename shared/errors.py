"""Expected errors: wrong requests, a temporary lack of service, and wrong settings. Any other exception is a bug.

`RequestError` and `UnavailableError` carry only text that a client may read. Each protocol's outermost layer maps them
to the form of that protocol.
"""


class RequestError(Exception):
    """The request is invalid, and a retry cannot help. `param` names the invalid parameter; `status` is for HTTP."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status


class UnavailableError(Exception):
    """The request is valid. It may succeed on another node or router, or after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float = 1.0, status: int = 503, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s
        self.status = status
        self.code = code


class ConfigError(ValueError):
    """A setting, or a file of the model, is unusable. The message names it and says how to fix it."""
