"""`baton plan`: searches for the cluster that carries the most of a given traffic within an SLO."""
