"""Settings of the text and its tokens."""

import dataclasses
import urllib.parse
from typing import Literal

from txl_jax.config.bounds import LENGTH, SEED
from txl_jax.config.fields import Section, at_least, free_text, local_path, setting, within


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeTextConfig(Section, key="data.probe"):
    """The synthetic text of ``data.name='probe'`` (data/sources/probe.py)."""

    shortest: int = at_least(2, 3, LENGTH)
    """Shortest distance from an answer back to the symbol it repeats, in tokens."""
    longest: int = at_least(2, 64, LENGTH)
    """Longest such distance; each episode draws its distance uniformly."""
    symbols: int = within(2, 26, 8)
    """C, the number of symbols an answer is drawn from, so that chance is 1/C."""
    noise: int = within(1, 26, 1)
    """Number of symbols that noise is drawn from; with 1 only the answers carry information."""
    tokens: int = at_least(1000, 1_000_000, 1_000_000_000)
    """Most tokens of the train split; valid and test each have a tenth of it."""
    seed: int = at_least(0, 0, SEED)
    """Seed of the text."""


def is_url(text: str) -> bool:
    """Whether a text is an address to download from; see the rule of ``data.url``."""
    try:
        parts = urllib.parse.urlsplit(text)
        host, port = parts.hostname or "", parts.port
        host.encode("idna")  # as the resolver does: no label may be empty or too long
    except ValueError:
        return False
    in_ascii = all("!" <= character <= "~" for character in text)
    known = parts.scheme in ("http", "https")
    return known and bool(host) and port != 0 and "@" not in parts.netloc and in_ascii


def _is_hash(text: str) -> bool:
    kind, _, digits = text.partition(":")
    sizes = {"md5": 32, "sha256": 64}
    return len(digits) == sizes.get(kind) and all(d in "0123456789abcdef" for d in digits)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(Section, key="data"):
    """The text, where it comes from, and what a token is."""

    name: Literal["stdlib", "ptb", "text", "enwik8", "text8", "wt103", "wt2", "lm1b", "probe"] = (
        "text"
    )
    """The corpus: stdlib (source of Python's standard library), ptb (Penn Treebank), wt103 and wt2
    (WikiText), lm1b (One Billion Word), enwik8, text8, probe (synthetic, with answers a known
    number of tokens back), or text (your own file or folder)."""
    path: str | None = local_path(None)
    """Local file, folder or archive; None: the corpus's own source."""
    url: str | None = free_text(
        None,
        "must be http:// or https://, a host, perhaps a port from 1 to 65535, and a path, in ASCII"
        " without spaces, user name or password",
        lambda v: v is None or is_url(v),
    )
    """Address to download the text from (text only; needs hash)."""
    hash: str | None = free_text(
        None,
        "must be 'md5:' and 32 or 'sha256:' and 64 lower-case hexadecimal digits",
        lambda v: v is None or _is_hash(v),
    )
    """Checksum of the downloaded file, md5:… or sha256:…."""
    vocab: Literal["byte", "char", "word", "subword"] | None = None
    """What a token is (stdlib, ptb, text; subword: text only); None: byte, for ptb word."""
    vocab_size: int = within(256, 1_000_000, 8000)
    """Number of subwords to learn; a short text gives fewer."""
    protocol: Literal["authors", "bytes", "double"] | None = None
    """Preparation of enwik8 (authors: no newline bytes, 204 symbols; bytes: all 205) and lm1b
    (authors: one <S> between sentences, as in PyTorch; double: two, as in TF, which adds a trivial
    target to each sentence); None: authors."""
    valid_fraction: float = setting(0.05, "must be above 0 and below 0.5", lambda v: 0 < v < 0.5)
    """Fraction of a single text, taken from its end, that becomes the valid split (text only)."""
    test_fraction: float = setting(0.05, "must be above 0 and below 0.5", lambda v: 0 < v < 0.5)
    """Fraction of a single text, taken from its end, that becomes the test split (text only)."""
    cache_dir: str | None = local_path(None)
    """Folder of prepared corpora; None: $TXL_DATA_DIR, or else ~/.cache/txl_jax."""
    probe: ProbeTextConfig = dataclasses.field(default_factory=ProbeTextConfig)
