"""Measures Baton against its promises and its peers. Ratios within one run; results are kept in results/."""
