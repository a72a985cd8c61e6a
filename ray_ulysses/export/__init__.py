"""Export: a committed checkpoint as a Hugging Face model directory that every other tool can load."""
