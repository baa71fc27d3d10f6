"""Which text: every setting of it, its default, its type and its rule."""

import dataclasses
import urllib.parse
from typing import Literal

from txl_jax.config.fields import free_text, local_path, rule
from txl_jax.config.probe_text import ProbeTextConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which text, where from, and what a token is.

    Attributes:
      name: ``stdlib`` (source of the running Python's standard library), ``ptb`` (Penn
        Treebank), ``wt103``, ``wt2`` (WikiText), ``lm1b`` (One Billion Word), ``enwik8``,
        ``text8``, ``probe`` (drawn: answers lie a known number of tokens back), or ``text``
        (any file or folder of the user's own).
      path: local file, folder or archive. ``None``: the corpus's own source.
      url: ``text`` only: where to download the file from; needs ``hash``.
      hash: ``md5:…`` or ``sha256:…`` of the downloaded file.
      vocab: ``stdlib``, ``text`` and ``ptb`` only: what a token is. ``None``: the corpus's own
        (stdlib and text: byte, ptb: word). ``subword`` (pieces of words) for ``text`` only.
      vocab_size: ``subword`` only: how many symbols; a short text gives fewer.
      protocol: ``enwik8``: ``authors`` leaves newline bytes out as their code does (204
        symbols), ``bytes`` leaves nothing out (205). ``lm1b``: ``authors`` has one ``<S>``
        between two sentences (PyTorch), ``double`` has two (TF), so that each sentence adds a
        trivial target. ``None``: ``authors``.
      valid_fraction, test_fraction: ``text`` only: shares cut from the end of a single text.
      cache_dir: where prepared corpora live. ``None``: ``$TXL_DATA_DIR``, else
        ``~/.cache/txl_jax``.
      probe: ``probe`` only: what is drawn, a section of its own.
    """

    name: Literal["stdlib", "ptb", "text", "enwik8", "text8", "wt103", "wt2", "lm1b", "probe"] = (
        "text"
    )
    path: str | None = local_path(None)
    url: str | None = free_text(
        None,
        "must be http:// or https://, a host, perhaps a port from 1 to 65535, and a path, in ASCII"
        " without spaces, user name or password",
        lambda v: v is None or is_url(v),
    )
    hash: str | None = free_text(
        None,
        "must be 'md5:' and 32 or 'sha256:' and 64 lower-case hexadecimal digits",
        lambda v: v is None or _is_hash(v),
    )
    vocab: Literal["byte", "char", "word", "subword"] | None = None
    vocab_size: int = rule(
        8000, "must be from 256 to 1000000", lambda v: 256 <= v <= 1_000_000, 1_000_000
    )
    protocol: Literal["authors", "bytes", "double"] | None = None
    valid_fraction: float = rule(0.05, "must be above 0 and below 0.5", lambda v: 0 < v < 0.5)
    test_fraction: float = rule(0.05, "must be above 0 and below 0.5", lambda v: 0 < v < 0.5)
    cache_dir: str | None = local_path(None)
    probe: ProbeTextConfig = dataclasses.field(default_factory=ProbeTextConfig)


def is_url(text: str) -> bool:
    """Whether a text is an address to download from; see the rule of ``data.url``."""
    try:
        parts = urllib.parse.urlsplit(text)
        host, port = parts.hostname or "", parts.port
        host.encode("idna")  # what the resolver does: no label is empty or too long
    except ValueError:
        return False
    in_ascii = all("!" <= character <= "~" for character in text)
    return (
        parts.scheme in ("http", "https")
        and bool(host)
        and port != 0
        and "@" not in parts.netloc
        and in_ascii
    )


def _is_hash(text: str) -> bool:
    kind, _, digits = text.partition(":")
    sizes = {"md5": 32, "sha256": 64}
    return len(digits) == sizes.get(kind) and all(d in "0123456789abcdef" for d in digits)
