"""The flags of `baton profile`."""

# ruff: noqa: RUF009 - `flag` returns a field of a dataclass

from dataclasses import dataclass
from pathlib import Path

from compare.options import flag


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """The options of the command line; each field is a flag."""

    out: Path | None = flag("FILE", None, "The cost file. Default: MODEL.json.")
    model: str = flag("MODEL", "", "The model. Default: the demo's.")
    set: list[str] = flag("SETTING=VALUE", [], "A setting of the node, such as device=cuda or threads=2.")
    cases: int = flag("NUMBER", 120, "Maximum number of cases (kinds of steps) to measure.", min=20, max=2000)
    seconds: float = flag("SECONDS", 0.3, "Time for each case; a case has at least 3 steps.", min=0.0)
    from_url: str = flag("URL", "", "A running cluster, whose records are used instead of measurements.", "--from")
    api_key: str = flag("KEY", "", "Admin key for the cluster of --from.", envvar="BATON_API_KEY")
