"""Sampling keeps the right tokens. The cut into batches and pieces does not change the result."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
from generation_cases import CFG, WITH_MEMORY, WITHOUT_MEMORY, prompts_of, some
from tiers import rest_integration

from txl_jax.checkpoint.trained_model import TrainedModel
from txl_jax.config import ConfigError, ExperimentConfig, GenerateConfig
from txl_jax.data.errors import DataError
from txl_jax.data.vocab import Vocab, encode_prompts
from txl_jax.evaluation.protocols import with_window
from txl_jax.generation.generate import TokenChunk, generate
from txl_jax.generation.sampling import (
    apply_repetition_penalty,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    sample,
)
from txl_jax.generation.text import continuations
from txl_jax.generation.utf8 import utf8_automaton
from txl_jax.generation.write import detokenise
from txl_jax.model import wide_products
from txl_jax.model.precision import in_compute_dtype
from txl_jax.model.transformer_xl import TransformerXL

GREEDY = GenerateConfig(length=12, mem_len=9, temperature=0.0)
SAMPLED = dataclasses.replace(GREEDY, temperature=1.0)  # greedy texts soon repeat one token


def made(prompts, c, cfg=CFG):
    """The new tokens of all continuations, int32 [B,length]."""
    params = tiny_models.variables(cfg)["params"]
    return np.concatenate([p.tokens for p in generate(cfg, params, prompts, c)], axis=1)


def test_greedy_takes_the_likeliest_token():
    logits = jnp.array([[0.1, 3.0, 2.0], [5.0, 1.0, 4.0]])
    keys = jax.random.split(jax.random.key(0), 2)
    got = sample(keys, logits, GenerateConfig(temperature=0.0))
    assert got.tolist() == [1, 0]


def test_temperature_divides_the_logits():
    logits = jnp.log(jnp.array([[0.2, 0.8]]))
    c = GenerateConfig(temperature=2.0)
    keys = jax.random.split(jax.random.key(0), 4000)
    drawn = jax.vmap(lambda k: sample(k[None], logits, c)[0])(keys)
    want = 0.8**0.5 / (0.8**0.5 + 0.2**0.5)
    assert float(drawn.mean()) == pytest.approx(want, abs=0.03)


@pytest.mark.parametrize("least", [{"temperature": 1e-6}, {"top_p": 1e-6}])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_the_least_temperature_and_top_p_take_the_likeliest_token(least, scale):
    logits = scale * jnp.array([[0.1, 3.0, 2.0], [5.0, 1.0, 4.0]])
    keys = jax.random.split(jax.random.key(0), 2)
    assert sample(keys, logits, GenerateConfig(**least)).tolist() == [1, 0]
    c = GenerateConfig(**least)
    assert not np.isnan(keep_top_p(logits / c.temperature, c.top_p)).any()


@pytest.mark.parametrize("key", ["temperature", "top_p"])
@pytest.mark.parametrize("value", [1e-300, 1e-40, 1e-7])
def test_what_float32_would_make_0_of_is_refused(key, value):
    with pytest.raises(ConfigError, match=rf"^config key generate\.{key} = {value}: must be "):
        ExperimentConfig.from_dict({"generate": {key: value}})


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
    """Continuations in which each token comes from a new pass over the last ``width`` tokens."""
    model = TransformerXL(cfg)
    variables = jax.tree.map(jnp.asarray, tiny_models.variables(cfg))

    @tiny_models.quick
    def next_tokens(tokens, lengths, n):
        nothing = model.init_mems(len(prompts), 0)
        logits, _ = model.apply(variables, tokens, nothing, lengths=lengths)
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(c.seed), 0), n)
        keys = jnp.broadcast_to(key, len(prompts))  # a row draws what it would draw alone
        return sample(keys, logits[jnp.arange(len(prompts)), lengths - 1], c)

    texts = [list(prompt) for prompt in prompts]
    for n in range(c.length):
        padded = np.zeros((len(prompts), width), np.int32)
        lengths = np.array([min(len(text), width) for text in texts], np.int32)
        for row, text in enumerate(texts):
            padded[row, : lengths[row]] = text[-width:]
        for text, token in zip(texts, next_tokens(padded, lengths, n), strict=True):
            text.append(int(token))
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


@pytest.mark.integration
@pytest.mark.parametrize("form", some(WITH_MEMORY, "relative", "adaptive"))
def test_sampling_draws_as_if_everything_were_recomputed_for_each_token(form):
    """The expected tokens come from the whole text as one segment, without memory or cache."""
    cfg = tiny_models.config(**WITH_MEMORY[form])
    c = dataclasses.replace(SAMPLED, mem_len=40, length=24)
    prompts = prompts_of(1, 5, 14)
    assert made(prompts, c, cfg).tolist() == naive(cfg, prompts, c, width=40)


@pytest.mark.integration
@pytest.mark.parametrize("form", WITHOUT_MEMORY)
@pytest.mark.parametrize(("mem_len", "width"), [(1, 1), (4, 4), (9, {"absolute_per_layer": 5})])
@pytest.mark.few(2)
def test_without_memory_each_token_is_made_from_the_last_ones(form, mem_len, width):
    """``absolute_per_layer`` reads at most as many tokens as its table of positions has rows."""
    cfg = tiny_models.config(**WITHOUT_MEMORY[form])
    width = width if isinstance(width, int) else width.get(form, mem_len)
    c = dataclasses.replace(SAMPLED, mem_len=mem_len)
    prompts = prompts_of(1, 3, *range(6, 20))
    assert made(prompts, c, cfg).tolist() == naive(cfg, prompts, c, width)


@pytest.mark.integration
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


@pytest.mark.integration
@pytest.mark.parametrize("mem_len", [2, 9])
def test_how_a_prompt_is_cut_does_not_change_the_result(monkeypatch, mem_len):
    prompts = prompts_of(23, 40, 31, 17)
    c = dataclasses.replace(SAMPLED, mem_len=mem_len, length=30)
    whole = made(prompts, c)
    for chunk in (1, 7):
        monkeypatch.setattr("txl_jax.generation.generate.PREFILL", chunk)
        np.testing.assert_array_equal(made(prompts, c), whole)


def test_pieces_do_not_change_what_is_sampled(monkeypatch):
    c = dataclasses.replace(SAMPLED, length=20)
    whole = made(prompts_of(4), c)
    monkeypatch.setattr("txl_jax.generation.generate.PER_DISPATCH", 7)
    np.testing.assert_array_equal(made(prompts_of(4), c), whole)
    longer = made(prompts_of(4), dataclasses.replace(c, length=33))
    np.testing.assert_array_equal(longer[:, :20], whole)
    other = made(prompts_of(4), dataclasses.replace(c, seed=1))
    assert (other != whole).any()


CAST = {
    **WITH_MEMORY,
    **WITHOUT_MEMORY,
    "untied": {"tie_weight": False, "d_embed": 4},
    "mixture": {"mixtures": 2},
}


@pytest.mark.parametrize("form", rest_integration(3, CAST))
@pytest.mark.few(2)
def test_matrices_that_are_cast_once_give_the_same_logits(form):
    cfg = dataclasses.replace(CFG, dtype="bfloat16", **CAST[form])
    model, variables = TransformerXL(cfg), tiny_models.variables(cfg)
    past: Any = model.init_mems(1, 0)
    if not cfg.memory_free:
        mems = tiny_models.memory(cfg, [3], 5)
        past = model.apply(variables, mems, 1, method="init_cache")
    tokens = tiny_models.tokens(cfg, 1, 1)
    run = lambda params: tiny_models.apply(cfg, "__call__")({"params": params}, tokens, past)[0]
    cast = in_compute_dtype(cfg, variables["params"])
    np.testing.assert_array_equal(run(cast), run(variables["params"]))
    sizes = {x.dtype.itemsize for x in jax.tree.leaves(cast) if x.ndim > 1}
    assert sizes == {4 if form == "mixture" else 2}


@pytest.mark.parametrize(
    ("form", "rows"),
    rest_integration(
        1,
        [
            *(("relative", 1), ("relative", 2), ("mixture", 1)),
            *((form, 1) for form in CAST if form not in ("relative", "mixture")),
            *((form, 2) for form in CAST if form != "relative"),
        ],
    ),
)
@pytest.mark.few(3)
def test_bfloat16_draws_with_the_losses_of_float32_about(monkeypatch, form, rows):
    """A single text uses other matrix products than several texts: see wide_products.py."""
    monkeypatch.setattr(wide_products, "_LEAST", 0)
    cfg = dataclasses.replace(CFG, dtype="bfloat16", **CAST[form])
    params, prompts = tiny_models.variables(cfg)["params"], prompts_of(5, 9)[:rows]
    c = dataclasses.replace(SAMPLED, mem_len=11, length=70)  # more tokens than one dispatch makes
    pieces = list(generate(cfg, params, prompts, c))
    cfg = with_window(dataclasses.replace(cfg, dtype="float32"))
    logits_of, model = tiny_models.apply(cfg, "__call__"), TransformerXL(cfg)
    for row, prompt in enumerate(prompts):
        new = np.concatenate([p.tokens for p in pieces], axis=1)[row]
        found = np.concatenate([p.nll for p in pieces], axis=1)[row]
        text = np.concatenate([prompt, new])
        if not cfg.memory_free:  # with a window, one long segment gives the same logits
            mems = model.init_mems(1, 11)
            whole, _ = logits_of({"params": params}, text[None], mems)
        for place in range(len(prompt), len(text), 23):
            if cfg.memory_free:
                newest = text[max(0, place - min(11, cfg.segment_limit or 11)) : place]
                mems = model.init_mems(1, 0)
                last = logits_of({"params": params}, newest[None], mems)[0][0, -1]
            else:
                last = whole[0, place - 1]
            nll = -jax.nn.log_softmax(last)[text[place]]
            # The tolerance is that of test_low_precision.py.
            assert found[place - len(prompt)] == pytest.approx(float(nll), abs=0.1)


def test_an_empty_prompt_and_an_unknown_token_are_refused():
    with pytest.raises(ValueError, match="prompt 1 is empty: a prompt needs at least one token"):
        made([np.array([1]), np.array([], np.int32)], GREEDY)
    with pytest.raises(ValueError, match=r"prompt 0\[\d\] = .*: a token id must be from 0 to 12"):
        made([np.array([13])], GREEDY)


def test_an_empty_prompt_of_text_is_a_line_end():
    encode_prompt = lambda vocab, text: encode_prompts(vocab, [text])[0]
    with_line_end = Vocab.from_chars(["a b\n"])
    assert with_line_end.decode(encode_prompt(with_line_end, "")) == "\n"
    without = Vocab.from_chars(["a b"])
    assert encode_prompt(without, "").tolist() == [0]
    words = Vocab.from_words(["a b\n"])
    assert encode_prompt(words, "").tolist() == encode_prompt(words, "  ").tolist() == [0]
    newline_last = Vocab("byte", ["97", "10"])
    assert encode_prompt(newline_last, "").tolist() == [1]
    no_newline = Vocab("byte", ["97", "98"])  # like the authors' enwik8 vocabulary
    assert encode_prompt(no_newline, "").tolist() == encode_prompt(no_newline, "\n").tolist() == [0]
    assert encode_prompt(Vocab("letter", ["a", "_"]), "").tolist() == [1]
    assert encode_prompt(Vocab("letter", ["a", "b"]), "").tolist() == [0]
    sentences = Vocab("sentence", ["a", "<UNK>", "<S>"])
    assert encode_prompt(sentences, "").tolist() == [2]
    assert encode_prompt(sentences, "a").tolist() == [2, 0]
    with pytest.raises(DataError, match=r"^generate.prompt: .*'z'"):
        encode_prompt(without, "az")


def scripted(monkeypatch, vocab, prompts, script, **settings):
    """The rows and shown texts of :func:`continuations` if a model makes the tokens ``script``."""
    cfg = tiny_models.config(vocab_size=len(vocab))
    trained = TrainedModel(TransformerXL(cfg), None, vocab, ExperimentConfig(model=cfg), 0)
    pieces = [TokenChunk(np.array(p), np.ones(np.shape(p), np.float32)) for p in script]
    monkeypatch.setattr("txl_jax.generation.text.generate", lambda *_: iter(pieces))
    c = GenerateConfig(length=sum(p.tokens.shape[1] for p in pieces), **settings)
    steps = list(continuations(trained, prompts, c))
    rows = [row for row, _ in steps[-1]]
    return rows, [[new for _, new in step] for step in steps]


def test_words_are_joined_to_the_prompt_by_a_space(monkeypatch):
    vocab = Vocab.from_words(["a b c\n"])
    script = [[[1]], [[2, 0]], [[3]]]
    _, shown = scripted(monkeypatch, vocab, ["c b"], script)
    assert shown == [[" a"], [" b\n"], ["c"]]


def test_pieces_of_text_are_whole_characters(monkeypatch):
    """If two pieces share a character, its bytes are shown together. Nothing is shown twice."""
    letters = "é€".encode() * 40
    script = [[[letter]] for letter in letters]
    (row,), shown = scripted(monkeypatch, Vocab.all_bytes(), ["a"], script)
    assert "".join(new for (new,) in shown) == row.text == letters.decode()
    assert all("\ufffd" not in new for (new,) in shown)


def test_a_stop_text_ends_a_row_and_is_not_shown_even_in_parts(monkeypatch):
    """Rows end separately. Text that might begin a stop text is held back until this is known."""
    vocab = Vocab.from_chars(["abxy"])
    ids = lambda *rows: [vocab.encode(row).tolist() for row in rows]
    script = [ids("axb", "abx"), ids("axy", "xax"), ids("bab", "bab"), ids("xyx", "aaa")]
    rows, shown = scripted(monkeypatch, vocab, ["a", "b"], script, stop=("xy", "baba"))
    assert [row.text for row in rows] == ["axba", "abxxax"]
    assert shown == [["ax", "ab"], ["ba", "xxa"], ["", "x"], ["", ""]]
    assert [row.ended for row in rows] == ["xy", "baba"]
    assert [len(row.nll) for row in rows] == [6, 10]


def test_a_model_of_bytes_writes_utf8_and_nothing_else():
    """With random weights, each text is valid UTF-8; the limit on tokens can cut a last character.

    Without ``valid_text``, some texts are invalid.
    """
    cfg = tiny_models.config(vocab_size=256)
    params, prompts = tiny_models.variables(cfg)["params"], ["a", "é", "", "€uro"]
    trained = TrainedModel(
        TransformerXL(cfg), params, Vocab.all_bytes(), ExperimentConfig(model=cfg), 0
    )
    c = GenerateConfig(length=130, mem_len=8, temperature=5.0)
    *_, last = continuations(trained, prompts, c)
    for row, _ in last:
        assert "\ufffd" not in row.text
        made = bytes(row.ids).decode("utf-8", errors="ignore")
        assert len(bytes(row.ids)) - len(made.encode()) <= 3
        assert made.endswith(row.text)
    anything = dataclasses.replace(c, valid_text=False)
    *_, last = continuations(trained, prompts, anything)
    assert any("\ufffd" in row.text for row, _ in last)


def test_the_automaton_takes_exactly_utf8():
    """The automaton and Python's decoder agree on each string of up to four bytes of ``edges``.

    ``edges`` has the first and the last byte of each range of bytes with the same role in UTF-8.
    """
    grammar = utf8_automaton(Vocab.all_bytes())
    edges = [0, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC1, 0xC2, 0xDF]
    edges += [0xE0, 0xE1, 0xEC, 0xED, 0xEE, 0xEF, 0xF0, 0xF1, 0xF3, 0xF4, 0xF5, 0xFF]
    for length in (1, 2, 3, 4):
        for text in itertools.product(edges, repeat=length):
            state, taken = 0, True
            for byte in text:
                taken = taken and bool(grammar.allowed[state, byte])
                state = int(grammar.next_state[state, byte])
            assert (taken and state == 0) == decodes(bytes(text)), bytes(text).hex()


def decodes(text):
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def test_a_character_that_the_vocabulary_cannot_end_is_not_begun():
    vocab = Vocab("byte", [str(b) for b in (0x41, 0xC3, 0xE2, 0xA9, 0xF4)])
    grammar = utf8_automaton(vocab)
    assert grammar.allowed[0].tolist() == [True, True, True, False, False]  # F4 needs 80..8F next
    assert grammar.allowed.any(axis=1).all()
    assert grammar.state_after(vocab.encode("A")) == 0
    assert grammar.state_after(np.array([1])) == 1


def test_min_p_keeps_what_is_not_far_below_the_likeliest():
    logits = jnp.log(jnp.array([[0.15, 0.5, 0.05, 0.3]]))
    kept = lambda p: np.isfinite(keep_min_p(logits, p)).tolist()[0]
    assert kept(0.0) == [True, True, True, True]
    assert kept(0.2) == [True, True, False, True]
    assert kept(0.7) == [False, True, False, False]


def test_a_repeated_token_is_made_less_likely_whatever_its_sign():
    seen = jnp.array([[True, True, False, False]])
    found = apply_repetition_penalty(jnp.array([[2.0, -2.0, 2.0, -2.0]]), seen, 4.0)
    assert found.tolist() == [[0.5, -8.0, 2.0, -2.0]]


@pytest.mark.integration
def test_the_repetition_penalty_knows_the_prompt_and_what_was_made():
    """Each token is the likeliest one after the logits of all earlier tokens are penalised."""
    c = dataclasses.replace(GREEDY, repetition_penalty=1.7, length=10, mem_len=40)
    prompts = prompts_of(3, 5)
    tokens = made(prompts, c)
    assert (tokens != made(prompts, dataclasses.replace(c, repetition_penalty=1.0))).any()
    model, variables = TransformerXL(CFG), tiny_models.variables(CFG)
    for prompt, row in zip(prompts, tokens.tolist(), strict=True):
        text = np.concatenate([prompt, row]).astype(np.int32)
        logits, _ = model.apply(variables, text[None], model.init_mems(1, 0))
        for n in range(len(prompt), len(text)):
            scores = np.array(logits[0, n - 1])
            for seen in set(text[:n].tolist()):
                scores[seen] = scores[seen] / 1.7 if scores[seen] > 0 else scores[seen] * 1.7
            assert text[n] == np.argmax(scores)


def test_a_sampled_row_of_a_batch_is_what_it_is_alone():
    prompts = prompts_of(1, 2, 11, 30)
    together = made(prompts, SAMPLED)
    for row, prompt in enumerate(prompts):
        np.testing.assert_array_equal(together[row], made([prompt], SAMPLED)[0])


def test_samples_of_one_prompt_differ_and_the_first_is_that_of_one():
    params = tiny_models.variables(CFG)["params"]
    (prompt,) = prompts_of(4)
    (piece,) = generate(CFG, params, [prompt] * 3, SAMPLED, samples=[0, 1, 2])
    assert len({tuple(row) for row in piece.tokens.tolist()}) == 3
    np.testing.assert_array_equal(piece.tokens[0], made([prompt], SAMPLED)[0])


@pytest.mark.integration
def test_the_loss_of_what_is_made_is_the_models_whatever_was_sampled_from():
    """Temperature, top-k and penalty change which tokens are drawn, not the losses reported."""
    c = dataclasses.replace(
        SAMPLED, mem_len=60, length=20, temperature=3.0, top_k=7, repetition_penalty=1.5
    )
    params = tiny_models.variables(CFG)["params"]
    prompts = prompts_of(5, 9)
    pieces = list(generate(CFG, params, prompts, c))
    tokens = np.concatenate([p.tokens for p in pieces], axis=1)
    model = TransformerXL(CFG)
    for row, prompt in enumerate(prompts):
        text = np.concatenate([prompt, tokens[row]])[None]
        nothing = model.init_mems(1, 0)
        nll, _ = model.apply({"params": params}, text[:, :-1], text[:, 1:], nothing, method="nll")
        found = np.concatenate([p.nll for p in pieces], axis=1)[row]
        np.testing.assert_allclose(found, nll[0, -20:], atol=1e-5)


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("10 @,@ 000 , well @-@ known ( 3 @.@ 5 )", "10,000, well-known (3.5)"),
        ('He said , " it \'s here " .', 'He said, "it\'s here".'),
        (" = Title = \n it does n't end ; no !", " = Title = \n it doesn't end; no!"),
        ("a 's b\nc : d", "a's b\nc: d"),
    ],
)
def test_wikitext_is_put_back_to_ordinary_text(text, plain):
    assert detokenise(text) == plain
