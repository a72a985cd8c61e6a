"""The model under ZeRO: building it, its loss, optimizer, learning rate and state."""
