"""Print the packages that `make lock` pins: the requirements of Baton, of `router.picker`, of the build and of torch.

torch itself and the CUDA libraries are left out: torch's CPU and CUDA builds have equal versions but different hashes,
and only the CUDA build needs the CUDA libraries.
"""

import re
import tomllib
from importlib.metadata import requires
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
BUILD = re.compile(r"(nvidia|cuda|triton|torch)\b")


def main() -> None:
    project = tomllib.loads(PROJECT.read_text())
    wanted = [*project["project"]["dependencies"], *project["project"]["optional-dependencies"]["picker"]]
    wanted += project["build-system"]["requires"]
    wanted += [text for text in requires("torch") or [] if "extra ==" not in text]
    print("\n".join(text for text in wanted if not BUILD.match(text)))


if __name__ == "__main__":
    main()
