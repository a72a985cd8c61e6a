"""The model under ZeRO: building, loss, optimizer, learning rate and state."""
