"""A document's content becomes token ids and label spans."""
