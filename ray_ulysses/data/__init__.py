"""The data plane, from the user's files to the rows that each rank receives.

In the order of the data flow: ``sources`` lists and reads files, ``tokenize`` turns documents into token ids and label
spans, ``prepare`` writes them to a ``corpus``, ``plan`` packs its documents into rows, and ``read`` gives each rank its
slices of those rows.
"""
