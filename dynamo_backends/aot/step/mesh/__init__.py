"""Steps on a mesh of devices: what users say of it, and where each tensor of a step is."""
