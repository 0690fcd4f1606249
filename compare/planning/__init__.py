"""`baton plan`: searches for the cluster that serves given traffic at the highest rate within an SLO."""
