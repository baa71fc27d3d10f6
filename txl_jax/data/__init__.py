"""Reads the text of a corpus, and cuts it into segments for the model.

A *source* names the files of a corpus, with their hashes and the bytes of each split. A *token
array* is one split as memory-mapped 1-D integers below ``len(vocab)``. *Pieces* are a token array
with the positions where its documents begin, at which memory is reset, or its sentences (One
Billion Word). A *stream* is a row of a batch: a contiguous part of a token array, or of its
sentences in a random order. B streams are read in parallel, and memory is carried along each
stream. A *segment* is the next T tokens of all B streams, ``[B, T]``, with the following token of
each as its target. It is the input of one step.

    source ──vocab──▶ token array ──streams──▶ segments
"""
