"""All fuzz targets: importing the modules that hold them enters them here."""

from tests.fuzz import files, peers, rim
from tests.fuzz.target import TARGETS, Fuzzed, Target, scratch

__all__ = ["TARGETS", "Fuzzed", "Target", "files", "peers", "rim", "scratch"]
