"""Matrix products with a model's weights: an interface, and the formats in which weights are stored."""
