"""The settings of the text and its tokens."""

import dataclasses
import re
import urllib.parse
from typing import Literal

from txl_jax.config.bounds import LENGTH, SEED, WORDS
from txl_jax.config.fields import Section, at_least, file_path, free_text, setting, within


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeTextConfig(Section, key="data.probe"):
    """Settings of the synthetic text of ``data.name='probe'`` (data/sources/probe.py)."""

    shortest: int = at_least(2, 3, LENGTH)
    """Shortest distance from an answer back to the symbol that it repeats, in tokens."""
    longest: int = at_least(2, 64, LENGTH)
    """Longest distance from an answer back to its symbol; distances are drawn uniformly."""
    symbols: int = within(2, 26, 8)
    """C, the number of symbols from which answers are drawn; a random guess is right 1/C times."""
    noise: int = within(1, 26, 1)
    """Number of symbols from which noise is drawn; with 1, only answers carry information."""
    tokens: int = at_least(1000, 1_000_000, 1_000_000_000)
    """Largest number of tokens of the train split; valid and test have a tenth of it each."""
    seed: int = at_least(0, 0, SEED)
    """Seed from which the text is drawn."""


def is_url(text: str) -> bool:
    """Whether a text is an address that follows the rule of ``data.url``."""
    try:
        parts = urllib.parse.urlsplit(text)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        return False
    return bool(known) and "@" not in parts.netloc and re.fullmatch("[!-~]+", text) is not None


Name = Literal[
    "stdlib", "ptb", "text", "tokens", "enwik8", "text8", "wt103", "wt2", "lm1b", "probe"
]
IntegerType = Literal["uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(Section, key="data"):
    """Settings of the text: its source, its splits and its tokens."""

    name: Name = "text"
    """The corpus: stdlib (source of Python's standard library), ptb (Penn Treebank), wt103 and wt2
    (WikiText), lm1b (One Billion Word), enwik8, text8, probe (synthetic, with answers a known
    number of tokens back), text (your own file or folder), or tokens (your own arrays of ids)."""
    path: str | None = file_path(None)
    """File, folder or archive with the text, local or gs://; None takes the corpus's own source."""
    dtype: IntegerType = "uint16"
    """Type of the numbers in a raw .bin file of data.name='tokens', in the machine's byte order; a
    .npy file states its type itself."""
    url: str | None = free_text(
        None,
        "must be http:// or https://, a host, perhaps a port from 1 to 65535, and a path, in ASCII"
        " without spaces, user name or password",
        is_url,
    )
    """Address from which the text is downloaded (data.name='text' only; needs data.hash)."""
    hash: str | None = free_text(
        None,
        "must be 'md5:' and 32 or 'sha256:' and 64 lower-case hexadecimal digits",
        re.compile("md5:[0-9a-f]{32}|sha256:[0-9a-f]{64}").fullmatch,
    )
    """Checksum of the downloaded file, as md5:… or sha256:…."""
    field: str = free_text("text", "must not be empty", bool)
    """Name of the field or column that has the text of each record: JSON lines, CSV, TSV, Parquet,
    Arrow (data.name='text' only)."""
    vocab: Literal["byte", "char", "word", "subword"] | None = None
    """Kind of token of stdlib, ptb and text (subword is for text only); None takes word for ptb and
    byte for stdlib and text."""
    vocab_size: int | None = within(2, WORDS, None)
    """Number of subwords to learn from the text (None takes 8000; a short text gives fewer), or of
    ids of data.name='tokens' (None takes the largest id plus 1)."""
    tokenizer: str | None = file_path(None)
    """File tokenizer.json of Hugging Face tokenizers, which cuts the text into tokens
    (data.name='text' only); a trained model stores its content."""
    document_separator: str | None = free_text(None, "must not be empty", bool)
    """Text (or id of data.name='tokens') that ends a document and, as an input, begins the next one
    with an empty memory; a continuation ends where the model generates it."""
    document_files: bool = False
    """Whether each text file of a folder is a document (text only); with data.name='tokens', each
    file of a folder without train and valid files always is a document."""
    cross_documents: bool = False
    """Whether the first token of each document is a target, predicted from the end of the document
    before it (memory is reset in any case); a separator always is a target."""
    protocol: Literal["authors", "bytes", "double"] | None = None
    """Preparation of enwik8 (authors drops newline bytes and leaves 204 symbols, bytes keeps all
    205) and of lm1b (authors has one <S> between sentences, as in PyTorch, and double has two, as
    in TF, which adds a trivial target to each sentence); None takes authors."""
    valid_fraction: float = setting(0.05, "must be above 0 and below 0.5", lambda v: 0 < v < 0.5)
    """Fraction of a single text, taken from its end, that becomes the valid split (text and
    tokens only)."""
    test_fraction: float = setting(0.05, "must be above 0 and below 0.5", lambda v: 0 < v < 0.5)
    """Fraction of a single text, taken from its end, that becomes the test split (text and
    tokens only)."""
    cache_dir: str | None = file_path(None, remote=False)
    """Folder of prepared corpora; None takes $TXL_DATA_DIR if it is set, or ~/.cache/txl_jax."""
    probe: ProbeTextConfig = dataclasses.field(default_factory=ProbeTextConfig)
