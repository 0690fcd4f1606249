"""All fuzz targets, registered by importing their modules."""

from tests.fuzz import files, http, peers
from tests.fuzz.target import TARGETS, Fuzzed, Target, scratch

__all__ = ["TARGETS", "Fuzzed", "Target", "files", "http", "peers", "scratch"]
