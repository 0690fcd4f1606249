"""Matrix products with a model's weights: one interface, and a format of the weights for each way to compute them."""
