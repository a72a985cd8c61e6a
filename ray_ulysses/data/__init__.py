"""The data pipeline, from the user's files to the rows that each rank receives.

In the order of the data flow: ``sources`` lists and reads files, ``tokenize`` converts documents to token ids and label
spans, ``prepare`` writes a ``corpus``, ``plan`` packs the corpus's documents into rows, and ``read`` gives each rank
its slices of those rows.
"""
