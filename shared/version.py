"""The version of the installed package."""

from importlib.metadata import PackageNotFoundError, version


def package_version() -> str:
    """Return the version, or "" if the package is not installed and runs from a checkout."""
    try:
        return version("baton-serve")
    except PackageNotFoundError:
        return ""
