"""Sampling keeps the tokens it should; generation does not depend on how it is batched or cut."""

import dataclasses

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
PARAMS = tiny_models.variables(CFG)["params"]
GREEDY = GenerateConfig(length=12, mem_len=9, temperature=0.0)


def made(prompts, c, cfg=CFG):
    """All continuations, int32 [B,length]."""
    return np.concatenate(list(generate(cfg, PARAMS, prompts, c)), axis=1)


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


def test_generation_equals_recomputing_everything_for_each_token():
    """By hand: the whole text as one segment, no cache, all within the window."""
    prompt = prompts_of(5)[0]
    c = dataclasses.replace(GREEDY, mem_len=40)
    model = TransformerXL(CFG)
    text = np.zeros((1, len(prompt) + c.length), np.int32)
    text[0, : len(prompt)] = prompt
    whole = jax.jit(lambda t: model.apply({"params": PARAMS}, t, model.init_mems(1, 0))[0])
    for n in range(len(prompt), text.shape[1]):  # what is to the right does not matter
        text[0, n] = int(jnp.argmax(whole(text)[0, n - 1]))
    assert made([prompt], c)[0].tolist() == text[0, len(prompt) :].tolist()


@pytest.mark.parametrize("mem_len", [3, 9, 40])
def test_a_row_of_a_batch_is_what_it_is_alone(mem_len):
    prompts = prompts_of(1, 2, 5, 11, 30)
    c = dataclasses.replace(GREEDY, mem_len=mem_len)
    together = made(prompts, c)
    for row, prompt in enumerate(prompts):
        np.testing.assert_array_equal(together[row], made([prompt], c)[0])


@pytest.mark.parametrize("mem_len", [2, 9])
def test_how_a_prompt_is_cut_does_not_change_the_result(monkeypatch, mem_len):
    prompts = prompts_of(23, 40, 31, 17)
    c = dataclasses.replace(GREEDY, mem_len=mem_len, length=30)
    whole = made(prompts, c)
    for chunk in (1, 7):
        monkeypatch.setattr("txl_jax.generation.generate._PREFILL", chunk)
        np.testing.assert_array_equal(made(prompts, c), whole)


def test_pieces_do_not_change_what_is_sampled(monkeypatch):
    c = dataclasses.replace(GREEDY, temperature=1.0, length=20)
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
    assert encode_prompt(words, "").tolist() == [0]
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
