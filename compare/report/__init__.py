"""The report of a comparison: a checked report.json and one self-contained report.html. It judges nothing itself."""
