"""A helper for tests of commands that refuse their settings."""

from collections.abc import Callable

import pytest


def refusal(capsys: pytest.CaptureFixture[str], command: Callable[[], object]) -> str:
    """Run a command that must end with status 2 and print one line, on stderr. Return this line."""
    try:
        status = command()
    except SystemExit as ended:
        status = ended.code
    out, err = capsys.readouterr()
    assert (status, out, err.count("\n")) == (2, "", 1), out + err
    assert "Traceback" not in err
    return err
