"""Model construction, losses, the ZeRO engine and its optimizer, and the engine's state."""
