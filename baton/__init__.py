"""The installed package. A wheel contains Baton's other packages and the demo model in this folder."""
