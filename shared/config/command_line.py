"""The command line of every process, with an option for each setting.

After wrong usage or an invalid value, the process prints one line on stderr and exits with status 2.
"""

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin

import typer
import typer.main
from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from shared.config.settings import Settings, flag_of, format_value, hide_password, parse_size, resolve, variable_of
from shared.errors import ConfigError

S = TypeVar("S", bound=Settings)

# The base class of usage errors. Typer does not export this class of click, and some versions of Typer contain their
# own copy of click.
Misuse = cast(type[Exception], next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"))


def settings_from_command_line(kind: type[S], argv: Sequence[str], prog: str) -> S:
    """Return the settings for `__main__`. Exit after --help and --print-config; exit with status 2 for a bad value."""
    app = typer.Typer(add_completion=False, rich_markup_mode=markup_mode())
    app.command(help=f"Run one process: {prog}.")(command_of(kind, prog, lambda settings: settings))
    result = run_app(app, argv, prog)
    if isinstance(result, kind):
        return result
    raise SystemExit(result)


def markup_mode() -> Literal["rich"] | None:
    """Return the markup mode of --help: boxes and colours on a terminal, plain text elsewhere."""
    return "rich" if sys.stdout.isatty() else None


def run_app(app: typer.Typer, argv: Sequence[str], prog: str) -> Any:
    """Run the command and return its result, or 0 after --help. On wrong usage, print a line and exit with status 2."""
    try:
        return typer.main.get_command(app).main(args=list(argv), prog_name=prog, standalone_mode=False)
    except Misuse as error:
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else prog
        print(f"{path}: {cast(typer.BadParameter, error).format_message()}", file=sys.stderr)
        raise SystemExit(2) from None


def command_of(kind: type[S], prog: str, run: Callable[[S], Any], positional: str = "") -> Callable[..., Any]:
    """Return a Typer command that has an option for each field and calls `run` with the settings.

    The field `positional`, if any, can also be given as an argument without its flag. If the settings are invalid or
    `run` raises ConfigError, the command prints one line on stderr and exits with status 2.
    """

    def command(print_config: bool, argument: str | None = None, **flags: object) -> Any:
        try:
            if argument is not None:
                if flags[positional] is not None:
                    raise ConfigError(f"{flag_of(positional)} {flags[positional]}: {argument!r} is given too; give one")
                flags[positional] = argument
            settings, sources = resolve(kind, flags, os.environ)
            if print_config:
                print_settings(settings, sources)
                return 0
            for name in kind.needed:
                if not getattr(settings, name):
                    raise ConfigError(f"{flag_of(name)} (or {variable_of(name)}) is required")
            return run(settings)
        except ConfigError as error:
            print(f"{prog}: {error}", file=sys.stderr)
            raise SystemExit(2) from None

    parameters = [_parameter(name, field, _panel(kind, name)) for name, field in kind.model_fields.items()]
    about = typer.Option("--print-config", help="Print every setting with its source, and exit.")
    parameters.append(_keyword("print_config", Annotated[bool, about], default=False))
    if positional:
        given = typer.Argument(metavar=positional.upper(), help=f"Same as {flag_of(positional)}.", show_default=False)
        parameters.append(_keyword("argument", Annotated[str | None, given], default=None))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _parameter(name: str, field: FieldInfo, panel: str) -> inspect.Parameter:
    """Return the option for a field. Its value is text, because pydantic parses the values of all sources."""
    flag = flag_of(name)
    default = format_value(field.get_default(call_default_factory=True))
    about = str(field.description)
    if default and f"{default}: " not in about:  # the text already explains the default
        about += f" Default: {default}."
    if field.annotation is bool:
        flag += f"/--no-{flag[2:]}"
    option = typer.Option(
        flag,
        help=about,
        metavar=None if field.annotation is bool else _metavar(field),
        show_default=False,
        rich_help_panel=panel,
    )
    return _keyword(name, Annotated[bool | None if field.annotation is bool else str | None, option], default=None)


def _keyword(name: str, annotation: object, default: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _metavar(field: FieldInfo) -> str:
    if get_origin(field.annotation) is Literal:
        return f"[{'|'.join(get_args(field.annotation))}]"
    if any(isinstance(item, BeforeValidator) and item.func is parse_size for item in field.metadata):
        return "SIZE"
    return {int: "INTEGER", float: "NUMBER"}.get(cast(type, field.annotation), "TEXT")


def _panel(kind: type[Settings], name: str) -> str:
    """Return the title of the group in --help: the docstring of the class that declares the field."""
    owner = next(base for base in kind.__mro__ if name in inspect.get_annotations(base))
    return str(owner.__doc__).split(";")[0]


def print_settings(settings: Settings, sources: Mapping[str, str]) -> None:
    """Print `name = value  # source` for each setting."""
    for name, field in type(settings).model_fields.items():
        value = format_value(getattr(settings, name))
        print(f"{name} = {hide_password(value) if field.repr or not value else '***'}  # {sources[name]}")
