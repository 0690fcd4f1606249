"""Expected errors: invalid requests, unavailable service and invalid settings. Any other exception is a bug."""


class BatonError(Exception):
    """An error whose text a client may read. The HTTP response has `status` and `code`."""

    def __init__(self, message: str, status: int, code: str | None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code


class RequestError(BatonError):
    """The request is invalid, and a retry cannot help. `param` names the invalid parameter."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message, status, code)
        self.param = param


class UnavailableError(BatonError):
    """The request is valid, and may succeed on another node or router, or after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float = 1.0, status: int = 503, code: str | None = None) -> None:
        super().__init__(message, status, code)
        self.retry_after_s = retry_after_s


def status_and_message(error: Exception) -> tuple[int, str]:
    """Return the HTTP status and the message that a client gets. The text of an unexpected error is not sent."""
    if isinstance(error, BatonError):
        return error.status, error.message
    return 500, "The server failed to handle this request."


class ConfigError(ValueError):
    """A setting or a model file is unusable. The message names the setting or the file, and says how to fix it."""
