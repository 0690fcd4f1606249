"""`baton profile`: measures how long the steps of a model take on a device, and writes a cost file."""
