"""Tokens to text, one token at a time."""

import codecs
from collections.abc import Sequence

from txl_jax.data.vocab import Vocab


class Decoder:
    """Decodes tokens one by one; the text does not depend on how they are cut into pieces.

    The pieces of :meth:`add` and :meth:`rest` joined are ``vocab.decode`` of all tokens, without
    the part that the tokens given at the start decode to. An incomplete character at the end of
    that part is not in it: it begins the first piece.
    """

    def __init__(self, vocab: Vocab, before: Sequence[int]):
        """``before``: the tokens that the new ones follow; at least one."""
        self._vocab = vocab
        self._last = list(before[-1:])
        self._utf8: codecs.IncrementalDecoder | None = None
        if vocab.kind in ("byte", "subword"):  # a character may be several tokens
            self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
            self._utf8.decode(vocab.decode_bytes(before))

    def add(self, token: int) -> str:
        """The text that one more token adds: whole characters only, so it may be empty."""
        if self._utf8 is not None:
            return self._utf8.decode(self._vocab.decode_bytes([token]))
        last, self._last = self._last, [token]  # white space depends on the token before
        return self._vocab.decode([*last, token])[len(self._vocab.decode(last)) :]

    def rest(self) -> str:
        """U+FFFD for a character that is still incomplete, else nothing."""
        return "" if self._utf8 is None else self._utf8.decode(b"", final=True)


def whole_characters(prompt: str) -> str:
    """A prompt without the bytes of an incomplete last character (``surrogateescape``)."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    return decoder.decode(prompt.encode("utf-8", "surrogateescape"))


def printable(text: str) -> str:
    """A text in which each byte that is not UTF-8 (``surrogateescape``) is U+FFFD."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
