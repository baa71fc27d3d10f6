"""Sampling keeps the tokens it should; generation does not depend on how it is batched or cut."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models

from txl_jax.config import ExperimentConfig, GenerateConfig
from txl_jax.data.errors import DataError
from txl_jax.data.vocab import Vocab
from txl_jax.generation.generate import generate
from txl_jax.generation.sampling import keep_top_k, keep_top_p, sample
from txl_jax.generation.text import continue_text, encode_prompt
from txl_jax.model.transformer_xl import TransformerXL
from txl_jax.workdir import Trained

CFG = tiny_models.config(n_layer=2)
GREEDY = GenerateConfig(length=12, mem_len=9, temperature=0.0)
SAMPLED = dataclasses.replace(GREEDY, temperature=1.0)  # greedy ones soon repeat one token


WITH_MEMORY: dict[str, dict[str, Any]] = {
    "relative": {},
    "pre_lnorm": {"pre_lnorm": True},
    "shaw": {"attention": "shaw", "n_positions": 6},
    "shared_projection": {"attention": "shared_projection"},
    "adaptive": {"cutoffs": (4, 9), "div_val": 2},
}
WITHOUT_MEMORY: dict[str, dict[str, Any]] = {
    "absolute": {"attention": "absolute", "n_positions": 2},  # which it does not use
    "absolute_per_layer": {"attention": "absolute_per_layer", "n_positions": 5, "d_head": 4},
}


def made(prompts, c, cfg=CFG):
    """All continuations, int32 [B,length]."""
    params = tiny_models.variables(cfg)["params"]
    return np.concatenate(list(generate(cfg, params, prompts, c)), axis=1)


def prompts_of(*lengths):
    rng = np.random.default_rng(0)
    return [rng.integers(0, CFG.vocab_size, n).astype(np.int32) for n in lengths]


def test_greedy_takes_the_likeliest_token():
    logits = jnp.array([[0.1, 3.0, 2.0], [5.0, 1.0, 4.0]])
    got = sample(jax.random.key(0), logits, GenerateConfig(temperature=0.0))
    assert got.tolist() == [1, 0]


def test_temperature_divides_the_logits():
    logits = jnp.log(jnp.array([[0.2, 0.8]]))
    c = GenerateConfig(temperature=2.0)
    keys = jax.random.split(jax.random.key(0), 4000)
    drawn = jax.vmap(lambda k: sample(k, logits, c)[0])(keys)
    want = 0.8**0.5 / (0.8**0.5 + 0.2**0.5)
    assert float(drawn.mean()) == pytest.approx(want, abs=0.03)


def test_top_k_keeps_k_tokens():
    logits = jnp.array([[1.0, 5.0, 3.0, 4.0]])
    assert np.isfinite(keep_top_k(logits, 2)).tolist() == [[False, True, False, True]]
    assert np.isfinite(keep_top_k(logits, 0)).all()
    assert np.isfinite(keep_top_k(logits, 9)).all()


def test_top_p_keeps_the_fewest_tokens_that_reach_p():
    logits = jnp.log(jnp.array([[0.15, 0.5, 0.05, 0.3]]))
    kept = lambda p: np.isfinite(keep_top_p(logits, p)).tolist()[0]
    assert kept(0.4) == [False, True, False, False]
    assert kept(0.5) == [False, True, False, False]
    assert kept(0.6) == [False, True, False, True]
    assert kept(0.9) == [True, True, False, True]
    assert kept(1.0) == [True, True, True, True]


def naive(cfg, prompts, c, width):
    """Continuations where every token is made by a fresh run of its row's last ``width`` tokens."""
    model = TransformerXL(cfg)
    variables = jax.tree.map(jnp.asarray, tiny_models.variables(cfg))

    @tiny_models.quick
    def next_tokens(tokens, lengths, n):
        nothing = model.init_mems(len(prompts), 0)
        logits, _ = model.apply(variables, tokens, nothing, lengths=lengths)
        key = jax.random.fold_in(jax.random.key(c.seed), n)
        return sample(key, logits[jnp.arange(len(prompts)), lengths - 1], c)

    texts = [list(prompt) for prompt in prompts]
    for n in range(c.length):
        padded = np.zeros((len(prompts), width), np.int32)
        lengths = np.array([min(len(text), width) for text in texts], np.int32)
        for row, text in enumerate(texts):
            padded[row, : lengths[row]] = text[-width:]
        for text, token in zip(texts, next_tokens(padded, lengths, n), strict=True):
            text.append(int(token))
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


@pytest.mark.parametrize("form", WITH_MEMORY)
def test_generation_equals_recomputing_everything_for_each_token(form):
    """The whole text as one segment, no memory and no cache, all within the window."""
    cfg = tiny_models.config(**WITH_MEMORY[form])
    c = dataclasses.replace(SAMPLED, mem_len=40, length=24)
    prompts = prompts_of(1, 5, 14)
    assert made(prompts, c, cfg).tolist() == naive(cfg, prompts, c, width=40)


@pytest.mark.parametrize("form", WITHOUT_MEMORY)
@pytest.mark.parametrize(("mem_len", "width"), [(1, 1), (4, 4), (9, {"absolute_per_layer": 5})])
def test_without_memory_each_token_is_made_from_the_last_ones(form, mem_len, width):
    """In every row, whatever the others hold; ``absolute_per_layer`` up to its table's length."""
    cfg = tiny_models.config(**WITHOUT_MEMORY[form])
    width = width if isinstance(width, int) else width.get(form, mem_len)
    c = dataclasses.replace(SAMPLED, mem_len=mem_len)
    prompts = prompts_of(1, 3, *range(6, 20))
    assert made(prompts, c, cfg).tolist() == naive(cfg, prompts, c, width)


def test_greedy_continuation_is_the_likeliest_at_every_step():
    c = dataclasses.replace(GREEDY, mem_len=40)
    prompts = prompts_of(5, 9)
    assert made(prompts, c).tolist() == naive(CFG, prompts, c, width=40)


@pytest.mark.parametrize("form", [WITH_MEMORY["relative"], WITHOUT_MEMORY["absolute"]])
@pytest.mark.parametrize("mem_len", [3, 40])
def test_a_row_does_not_depend_on_its_neighbours(form, mem_len):
    cfg = tiny_models.config(**form)
    prompts, others = prompts_of(1, 2, 5, 11, 30), prompts_of(9, 31, 1, 2, 4)
    c = dataclasses.replace(SAMPLED, mem_len=mem_len)
    together = made(prompts, c, cfg)
    for kept in (slice(0, None, 2), slice(1, None, 2)):
        mixed = list(others)
        mixed[kept] = prompts[kept]
        np.testing.assert_array_equal(made(mixed, c, cfg)[kept], together[kept])


def test_a_greedy_row_of_a_batch_is_what_it_is_alone():
    prompts = prompts_of(1, 2, 11, 30)
    together = made(prompts, GREEDY)
    for row, prompt in enumerate(prompts):
        np.testing.assert_array_equal(together[row], made([prompt], GREEDY)[0])


@pytest.mark.parametrize("mem_len", [2, 9])
def test_how_a_prompt_is_cut_does_not_change_the_result(monkeypatch, mem_len):
    prompts = prompts_of(23, 40, 31, 17)
    c = dataclasses.replace(SAMPLED, mem_len=mem_len, length=30)
    whole = made(prompts, c)
    for chunk in (1, 7):
        monkeypatch.setattr("txl_jax.generation.generate._PREFILL", chunk)
        np.testing.assert_array_equal(made(prompts, c), whole)


def test_pieces_do_not_change_what_is_sampled(monkeypatch):
    c = dataclasses.replace(SAMPLED, length=20)
    whole = made(prompts_of(4), c)
    monkeypatch.setattr("txl_jax.generation.generate._PER_DISPATCH", 7)
    np.testing.assert_array_equal(made(prompts_of(4), c), whole)
    longer = made(prompts_of(4), dataclasses.replace(c, length=33))
    np.testing.assert_array_equal(longer[:, :20], whole)
    other = made(prompts_of(4), dataclasses.replace(c, seed=1))
    assert (other != whole).any()


def test_an_empty_prompt_and_an_unknown_token_are_refused():
    with pytest.raises(ValueError, match="prompt 1 is empty: it needs at least one token"):
        made([np.array([1]), np.array([], np.int32)], GREEDY)
    with pytest.raises(ValueError, match="prompt 0 has a token outside the 13 of the vocabulary"):
        made([np.array([13])], GREEDY)


def test_an_empty_prompt_of_text_is_a_line_end():
    with_line_end = Vocab.of_chars(["a b\n"])
    assert with_line_end.decode(encode_prompt(with_line_end, "")) == "\n"
    without = Vocab.of_chars(["a b"])
    assert encode_prompt(without, "").tolist() == [0]
    words = Vocab.of_words(["a b\n"])
    assert encode_prompt(words, "").tolist() == encode_prompt(words, "  ").tolist() == [0]
    newline_last = Vocab("byte", ["97", "10"])
    assert encode_prompt(newline_last, "").tolist() == [1]
    no_newline = Vocab("byte", ["97", "98"])  # as the authors' enwik8
    assert encode_prompt(no_newline, "").tolist() == encode_prompt(no_newline, "\n").tolist() == [0]
    assert encode_prompt(Vocab("letter", ["a", "_"]), "").tolist() == [1]
    assert encode_prompt(Vocab("letter", ["a", "b"]), "").tolist() == [0]
    sentences = Vocab("sentence", ["a", "<UNK>", "<S>"])
    assert encode_prompt(sentences, "").tolist() == [2]
    assert encode_prompt(sentences, "a").tolist() == [2, 0]
    with pytest.raises(DataError, match=r"^generate.prompt: .*'z'"):
        encode_prompt(without, "az")


def test_words_are_joined_to_the_prompt_by_a_space():
    vocab = Vocab.of_words(["a b c\n"])
    cfg = tiny_models.config(vocab_size=len(vocab))
    trained = Trained(TransformerXL(cfg), None, vocab, ExperimentConfig(model=cfg), 0)
    script = [np.array([[1]]), np.array([[2, 0]]), np.array([[3]])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("txl_jax.generation.text.generate", lambda *_: iter(script))
        pieces = list(continue_text(trained, GenerateConfig(length=4, prompt="c b")))
    assert pieces == [" a", " b\n", "c"]


def test_pieces_of_text_are_whole_characters():
    """Bytes of one character made in two pieces are shown together, and nothing twice."""
    cfg = tiny_models.config(vocab_size=256)
    letters = "é€".encode() * 40
    script = iter([np.array([list(letters[i : i + 1])]) for i in range(len(letters))])
    c = GenerateConfig(length=len(letters), prompt="a")
    trained = Trained(TransformerXL(cfg), None, Vocab.of_bytes(), ExperimentConfig(model=cfg), 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("txl_jax.generation.text.generate", lambda *_: script)
        pieces = list(continue_text(trained, c))
    assert "".join(pieces) == letters.decode()
    assert all("\ufffd" not in piece for piece in pieces)
