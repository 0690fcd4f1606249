"""The version of the installed package."""

from importlib.metadata import PackageNotFoundError, version


def package_version() -> str:
    """Return the version, or "" if the package runs from a checkout without being installed."""
    try:
        return version("baton-serve")
    except PackageNotFoundError:
        return ""
