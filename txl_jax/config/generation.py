"""Settings of text generation."""

import dataclasses

from txl_jax.config.bounds import LENGTH, ROWS, SEED, WORDS
from txl_jax.config.evaluation import COLDEST
from txl_jax.config.fields import Section, at_least, free_text, local_path, probability, within

LEAST_SHARE = 1e-6
"""The least ``top_p``; any less also keeps only the most likely token."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateConfig(Section, key="generate"):
    """How text is continued (section 4.4 and appendix E of the paper)."""

    prompt: str = free_text("")
    """Text to continue."""
    prompt_file: str | None = local_path(None)
    """File with the text to continue; '-': standard input."""
    prompts_file: str | None = local_path(None)
    """File with a prompt per line; .jsonl: a string or an object with 'prompt' per line."""
    batch_size: int = at_least(1, 8, ROWS)
    """Prompts that are continued together."""
    samples: int = at_least(1, 1, ROWS)
    """Continuations of each prompt."""
    length: int = at_least(0, 512, 10 * LENGTH)
    """Tokens to generate; 0: no sample after training."""
    mem_len: int = at_least(1, 512, LENGTH)
    """M, hidden states kept while generating."""
    temperature: float = within(COLDEST, 100, 1.0, also="0 (greedy) or ")
    """Divides the logits; 0 is greedy, and 1 samples from the model's own distribution."""
    top_k: int = at_least(0, 0, WORDS)
    """Sample from the k most likely tokens; 0: from all."""
    top_p: float = within(LEAST_SHARE, 1, 1.0)
    """Sample from the fewest tokens whose probability reaches p; 1: from all."""
    min_p: float = probability(0.0)
    """Sample from tokens with at least this fraction of the highest probability; 0: all."""
    repetition_penalty: float = at_least(1, 1.0, 1000)
    """Divides positive and multiplies negative logits of tokens that the text already has (Keskar
    et al. 2019); 1: none."""
    stop: tuple[str, ...] = free_text((), "must not have an empty text", all)
    """A continuation ends before the first complete one of these texts (JSON list, or commas)."""
    valid_text: bool = True
    """Let models of bytes generate valid UTF-8 only."""
    detokenise: bool = False
    """Show WikiText's spacing and @-@ as ordinary text."""
    json: str | None = local_path(None)
    """File to append each continuation to as a JSON line; '-': standard output alone."""
    seed: int = at_least(0, 0, SEED)
    """Seed of sampling, separate from the experiment's."""
