"""Pure functions on one rank's tensors: no communication, no state, nothing of the rest of the package."""
