"""The `baton compare` command, which imports its modules only when it runs, so that `baton --help` is fast."""

import asyncio
import inspect
import sys
from dataclasses import MISSING, fields
from typing import Annotated, Any

from compare.options import CompareOptions
from shared.errors import ConfigError

BAD_INPUT = 2


def compare(**given: Any) -> int:
    """Run the command. Return 0 if there is a verdict, else 1. On bad input, print one line and raise SystemExit(2)."""
    try:
        from compare.main import run_compare
    except ModuleNotFoundError as error:
        print(f"baton compare: needs {error.name}: pip install -e .", file=sys.stderr)
        raise SystemExit(BAD_INPUT) from None
    try:
        return asyncio.run(run_compare(CompareOptions(**given)))
    except ConfigError as error:
        print(f"baton compare: {error}", file=sys.stderr)
        raise SystemExit(BAD_INPUT) from None


# Typer reads the flags from the function's signature, which is generated from the fields of CompareOptions.
_PARAMETERS = [
    inspect.Parameter(
        each.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=[] if each.default is MISSING else each.default,
        annotation=Annotated[each.type, each.metadata["flag"]],
    )
    for each in fields(CompareOptions)
]
compare.__signature__ = inspect.Signature(_PARAMETERS)  # type: ignore[attr-defined]
compare.__annotations__ = {parameter.name: parameter.annotation for parameter in _PARAMETERS}
