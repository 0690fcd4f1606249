"""The demo models, and the script that trained them."""
