"""Text to segments, in a few terms.

A *source* is where a corpus's text is found: files, hashed, with the bytes of each split. A
*token array* is one split as 1-D integers, memory-mapped, each below ``len(vocab)``; *sentences*
(One Billion Word) are one with the places where they begin. A *stream* is one contiguous run of a
token array, or sentences one after another: B of them lie side by side and memory is carried
along each. A *segment* is the next T tokens of all B streams, ``[B, T]``, with the T tokens after
them as targets: what a model is given in one step.

    source ──builders──▶ text ──vocab──▶ token array ──streams──▶ segments
"""
