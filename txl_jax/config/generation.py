"""The settings of text generation."""

import dataclasses

from txl_jax.config.bounds import LENGTH, ROWS, SEED, WORDS
from txl_jax.config.evaluation import COLDEST
from txl_jax.config.fields import Section, at_least, file_path, free_text, probability, within

LEAST_SHARE = 1e-6
"""The smallest ``top_p``; smaller values also keep only the most likely token."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateConfig(Section, key="generate"):
    """Settings of text generation (section 4.4 and appendix E of the paper)."""

    prompt: str = free_text("")
    """Text that the model continues."""
    prompt_file: str | None = file_path(None)
    """File with the text that the model continues, or a .npy file with its ids; '-' reads standard
    input."""
    prompts_file: str | None = file_path(None)
    """File with one prompt per line; in a .jsonl file, a string or an object with 'prompt'; or a
    .npy file of ids, with the position of each prompt in NAME.starts.npy beside it."""
    batch_size: int = at_least(1, 8, ROWS)
    """Number of prompts that are continued together."""
    samples: int = at_least(1, 1, ROWS)
    """Number of continuations of each prompt."""
    length: int = at_least(0, 512, 10 * LENGTH)
    """Number of tokens to generate; 0 turns generation after training off."""
    mem_len: int = at_least(1, 512, LENGTH)
    """M, the number of hidden states that are kept while generating."""
    temperature: float = within(COLDEST, 100, 1.0, also="0 (greedy) or ")
    """Divisor of the logits; 0 is greedy, and 1 samples from the model's own distribution."""
    top_k: int = at_least(0, 0, WORDS)
    """Sample from the k most likely tokens; 0 allows all tokens."""
    top_p: float = within(LEAST_SHARE, 1, 1.0)
    """Sample from the fewest tokens whose total probability reaches p; 1 allows all tokens."""
    min_p: float = probability(0.0)
    """Sample from tokens with at least this fraction of the highest probability; 0 allows all."""
    repetition_penalty: float = at_least(1, 1.0, 1000)
    """Penalty that divides positive and multiplies negative logits of tokens that the text already
    has (Keskar et al. 2019); 1 is no penalty."""
    stop: tuple[str, ...] = free_text((), "must not have an empty text", all)
    """Texts before which a continuation ends (a JSON list, or separated by commas)."""
    valid_text: bool = True
    """Whether a model of bytes may generate valid UTF-8 only."""
    detokenise: bool = False
    """Whether WikiText's spacing and @-@ are shown as ordinary text."""
    json: str | None = file_path(None, remote=False)
    """File to which each continuation is appended as a JSON line; '-' is standard output alone."""
    seed: int = at_least(0, 0, SEED)
    """Seed of sampling, separate from the seed of the experiment."""
