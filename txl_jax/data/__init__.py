"""Reads the text of a corpus, and cuts it into segments for the model.

A *source* names the files of a corpus, with their hashes and the bytes of each split. A *token
array* is one split as memory-mapped 1-D integers below ``len(vocab)``. *Pieces* are a token array
that is divided into documents, or into sentences (One Billion Word). Memory is reset where a
document begins, but not where a sentence begins. A *stream* is a row of a batch: a contiguous part
of a token array, whose sentences may be in a random order. B streams are read in parallel, and
memory is carried along each stream. A *segment* is the next T tokens of all B streams, ``[B, T]``,
and the input of one step. The target of each token is the token after it.

    source ──vocab──▶ token array ──streams──▶ segments
"""
