"""The report of a comparison: report.json and the self-contained page report.html."""
