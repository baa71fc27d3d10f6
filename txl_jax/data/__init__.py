"""Reads the text of a corpus, and cuts it into segments for the model.

A *source* names the files of a corpus, with their hashes and the bytes of each split. A *token
array* is one split as memory-mapped 1-D integers below ``len(vocab)``. *Sentences* (One Billion
Word) are a token array with the position where each sentence begins. *Documents* are one with the
positions where memory is reset. A *stream* is a contiguous
part of a token array, or a sequence of sentences. B streams are read in parallel, and memory is
carried along each stream. A *segment* is the next T tokens of all B streams, ``[B, T]``, with the
following token of each as its target. It is the input of one step.

    source ──vocab──▶ token array ──streams──▶ segments
"""
