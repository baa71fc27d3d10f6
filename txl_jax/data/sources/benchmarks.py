"""The benchmark corpora ``ptb``, ``wt103``, ``wt2``, ``enwik8`` and ``text8``.

Penn Treebank is as Mikolov prepared it. WikiText (Merity et al. 2016) keeps case. Its first
address is gone; the mirror is kept by its first author. The hashes of its archives are those that
torchtext published. No hash is published for the unpacked files, only how many tokens they hold.

``enwik8`` and ``text8`` are 100,000,000 bytes of Wikipedia of 2006, 90M / 5M / 5M. Of ``text8``
(a to z and space) white space at both ends of each split is stripped, as the authors do.
``enwik8`` has two protocols, by name:

- ``authors``: their preparation drops the newline byte, so there are 204 symbols, and bits per
  character are per byte other than newline.
- ``bytes``: no byte is dropped, 205 symbols.

Scores of the two do not compare: only one of them counts the newline as a token.

The authors count the vocabulary over all three splits, but for ``wt103``.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

from txl_jax.data.errors import DataError
from txl_jax.data.sources.published import PublishedCorpus
from txl_jax.data.sources.source import SPLITS, merge_small


def decode_numbers(parts: Iterable[bytes]) -> Iterator[bytes]:
    """The bytes that the authors' script wrote as decimal numbers.

    Spaces separate the numbers; a line end is itself the newline byte, as that script left it.

    Raises:
      DataError: a word is not the number of a byte.
    """
    rest = b""
    for block in merge_small(parts):
        text = rest + block
        end = max(text.rfind(b" "), text.rfind(b"\n")) + 1
        rest = text[end:]
        yield _bytes_of_numbers(text[:end])
    yield _bytes_of_numbers(rest)


def _bytes_of_numbers(text: bytes) -> bytes:
    numbers = text.replace(b"\n", b" 10 ").split()
    try:
        return bytes(map(int, numbers))
    except ValueError:
        wrong = next(n for n in numbers if not n.isdigit() or len(n) > 3 or int(n) > 255)
        raise _not_prepared("enwik8", wrong, "the decimal number of a byte") from None


def decode_symbols(parts: Iterable[bytes]) -> Iterator[bytes]:
    """The text that the authors' script wrote as characters between spaces.

    Raises:
      DataError: a symbol is longer than one character.
    """
    last = b" "
    for part in parts:
        at_edge = bool(last.strip() and part[:1].strip())
        text = b"".join(symbols := part.split())
        if at_edge or len(text) != len(symbols):
            wrong = next((s for s in symbols if len(s) > 1), last + part[:1])
            raise _not_prepared("text8", wrong, "one character")
        last = part[-1:]
        yield text.replace(b"_", b" ")


def _not_prepared(name: str, wrong: bytes, expected: str) -> DataError:
    return DataError(
        f"{name}: {wrong[:20].decode('utf-8', 'replace')!r} in train.txt, valid.txt or test.txt"
        f" is not {expected}, as the authors' script writes them; name the raw file or {name}.zip"
        " in data.path"
    )


def _counts(train: int, valid: int, test: int, symbols: int) -> Mapping[tuple[str, str], int]:
    tokens = {("tokens", s): n for s, n in zip(SPLITS, (train, valid, test), strict=True)}
    return {**tokens, ("symbols", ""): symbols}


PTB = PublishedCorpus(
    name="ptb",
    title="Penn Treebank",
    url="http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz",
    names={split: f"ptb.{split}.txt" for split in SPLITS},
    patterns=("ptb.{}.txt", "{}.txt"),
    counts=_counts(929_589, 73_760, 82_430, 10_000),
    inside=(".", "data", "simple-examples/data"),
    md5={
        "train": "f26c4b92c5fdc7b3f8c7cdcb991d8420",
        "valid": "aa0affc06ff7c36e977d7cd49e3839bf",
        "test": "8b80168b89c18661a38ef683c0dc3721",
    },
)
WT103 = PublishedCorpus(
    name="wt103",
    title="WikiText-103",
    url="https://wikitext.smerity.com/wikitext-103-v1.zip",
    names={split: f"wiki.{split}.tokens" for split in SPLITS},
    patterns=("wiki.{}.tokens", "{}.txt"),
    counts=_counts(103_227_021, 217_646, 245_569, 267_735),
    counted=("train",),
    inside=(".", "wikitext-103"),
    archive_md5="9ddaacaf6af0710eda8c456decff7832",
)
WT2 = dataclasses.replace(
    WT103,
    name="wt2",
    title="WikiText-2",
    url="https://wikitext.smerity.com/wikitext-2-v1.zip",
    counts=_counts(2_088_628, 217_646, 245_569, 33_278),
    counted=SPLITS,
    inside=(".", "wikitext-2"),
    archive_md5="542ccefacc6c27f945fb54453812b3cd",
)
_SIZES = {"train": 90_000_000, "valid": 5_000_000, "test": 5_000_000}
ENWIK8 = PublishedCorpus(
    name="enwik8",
    title="enwik8, the authors' protocol (newline bytes left out)",
    url="http://mattmahoney.net/dc/enwik8.zip",
    names={"enwik8": "enwik8"},
    patterns=("{}.txt", "{}.txt.raw", "{}.raw"),  # prepared by the authors' script; the text
    counts={**{("bytes", split): size for split, size in _SIZES.items()}, ("symbols", ""): 204},
    protocol={"protocol": "authors"},
    md5={"enwik8": "a1fa5ffddb56f4953e226637dabbb36a"},
    decode=decode_numbers,
    decoded_key="numbers",
)
ENWIK8_BYTES = dataclasses.replace(
    ENWIK8,
    title="enwik8, the byte protocol (no byte left out)",
    counts={**ENWIK8.counts, ("symbols", ""): 205},
    protocol={"protocol": "bytes"},
)
TEXT8 = dataclasses.replace(
    ENWIK8,
    name="text8",
    title="text8",
    url="http://mattmahoney.net/dc/text8.zip",
    names={"text8": "text8"},
    # a split loses at most the one space at each of its ends
    counts={
        **{("bytes", split): range(size - 2, size + 1) for split, size in _SIZES.items()},
        ("symbols", ""): 27,
    },
    protocol={},
    md5={"text8": "3bea1919949baf155f99411df5fada7e"},
    decode=decode_symbols,
    decoded_key="symbols",
    strip=True,
)

CORPORA = {
    ("ptb", None): PTB,
    ("wt103", None): WT103,
    ("wt2", None): WT2,
    ("enwik8", None): ENWIK8,
    ("enwik8", "authors"): ENWIK8,
    ("enwik8", "bytes"): ENWIK8_BYTES,
    ("text8", None): TEXT8,
}
"""By name and protocol."""
