"""The commands `baton compare`, `baton plan` and `baton profile`, which import their modules only when they run, so
that `baton --help` is fast."""

import asyncio
import inspect
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Annotated, Any

from compare.options import CompareOptions
from compare.planning.options import PlanOptions
from compare.profiling.options import ProfileOptions
from shared.errors import ConfigError

BAD_INPUT = 2


def _compare(options: CompareOptions) -> int:
    from compare.main import run_compare

    return asyncio.run(run_compare(options))


def _plan(options: PlanOptions) -> int:
    from compare.planning.main import run_plan

    return run_plan(options)


def _profile(options: ProfileOptions) -> int:
    from compare.profiling.main import run_profile

    return run_profile(options)


def _command(name: str, kind: type[Any], run: Callable[[Any], int]) -> Callable[..., int]:
    """Return a command whose flags are the fields of `kind`, and whose result is the exit status that `run` returns. On
    bad input, the command prints one line and raises SystemExit(2)."""

    def command(**given: Any) -> int:
        try:
            return run(kind(**given))
        except ModuleNotFoundError as error:
            print(f"baton {name}: needs {error.name}: pip install -e .", file=sys.stderr)
        except ConfigError as error:
            print(f"baton {name}: {error}", file=sys.stderr)
        raise SystemExit(BAD_INPUT)

    # Typer reads the flags from the function's signature.
    parameters = [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=each.default if each.default_factory is MISSING else each.default_factory(),
            annotation=Annotated[each.type, each.metadata["flag"]],
        )
        for each in fields(kind)
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


compare = _command("compare", CompareOptions, _compare)
plan = _command("plan", PlanOptions, _plan)
profile = _command("profile", ProfileOptions, _profile)
