"""The model under ZeRO-3: building it, its loss, its optimizer and schedule, its state."""
