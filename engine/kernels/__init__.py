"""The element-wise work of a decoder layer, between matrix products and attention: one interface, a set a device."""
