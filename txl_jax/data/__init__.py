"""Text to segments, in a few terms.

A *source* says where a corpus's text is: files, hashed, with the bytes of each split. A
*token array* is one split as 1-D integers, memory-mapped, each below ``len(vocab)``; *sentences*
(One Billion Word) are one with the positions where they begin. A *stream* is one contiguous part
of a token array, or sentences one after another. B streams are read side by side, and memory is
carried along each. A *segment* is the next T tokens of all B streams, ``[B, T]``, with the T
tokens after them as targets: the input of one step.

    source ──vocab──▶ token array ──streams──▶ segments
"""
