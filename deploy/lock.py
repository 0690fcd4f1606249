"""Prints what `make lock` pins: what Baton needs and is built with, and what torch needs, but not torch itself.

torch's CPU and CUDA builds share a version and not their hashes, and the CUDA libraries belong to one of them.
"""

import re
import tomllib
from importlib.metadata import requires
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
BUILD = re.compile(r"(nvidia|cuda|triton|torch)\b")


def main() -> None:
    project = tomllib.loads(PROJECT.read_text())
    wanted = [*project["project"]["dependencies"], *project["build-system"]["requires"], "editables"]
    wanted += [text for text in requires("torch") or [] if "extra ==" not in text]
    print("\n".join(text for text in wanted if not BUILD.match(text)))


if __name__ == "__main__":
    main()
