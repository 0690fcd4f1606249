"""The demo model, and the script that trained it."""
