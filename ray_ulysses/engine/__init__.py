"""The model under ZeRO: building it, its loss, its optimizer and schedule, its state."""
