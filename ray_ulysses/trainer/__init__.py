"""The training loop and its components, independent of Ray: usable with any launcher."""
