"""Every public name has an example in its docstring, which runs unchanged."""

import doctest
import inspect
import os

import jax
import numpy as np
import pytest
import tiny_models
from places import ROOT

import txl_jax
from txl_jax.data.vocab import Vocab

NOT_RUN = {"push": "uploads, which needs a login at the Hub; test_loading.py has a stand-in"}
"""Names whose example is not run, and the reason."""
TRAINS = ("sweep",)
"""Names whose example trains several models, so its test is slow."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder in which the examples run: it has ``configs/`` and a small byte-level model."""
    there = tmp_path_factory.mktemp("examples")
    (there / "configs").symlink_to(ROOT / "configs")
    cfg = tiny_models.config(vocab_size=256)
    params = jax.tree.map(np.asarray, tiny_models.variables(cfg)["params"])
    exp = txl_jax.ExperimentConfig(model=cfg, name="quickstart")
    model = txl_jax.TransformerXL(cfg)
    trained = txl_jax.LanguageModel(model, params, Vocab.all_bytes(), exp, 0)
    txl_jax.save(trained, str(there / "runs" / "quickstart"))
    return there


def examples(name):
    """Returns the examples in a public name's docstring; they start with no names defined."""
    thing = getattr(txl_jax, name)
    text = inspect.cleandoc(thing.__doc__ or "")
    return doctest.DocTestParser().get_doctest(text, {}, name, f"<{name}>", 0)


@pytest.mark.integration
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n in TRAINS else ()) for n in txl_jax.__all__],
)
def test_the_example_of_every_public_name_runs(name, folder, monkeypatch):
    monkeypatch.chdir(folder)
    found = examples(name)
    shown = [e for e in found.examples if not e.options.get(doctest.SKIP)]
    assert found.examples, f"{name} has no example in its docstring"
    if inspect.isfunction(getattr(txl_jax, name)):
        assert any(f"txl_jax.{name}(" in example.source for example in found.examples)
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False)
    result = runner.run(found, out=said.append)
    assert result.failed == 0, "".join(said)
    assert (len(shown) < len(found.examples)) == (name in NOT_RUN)


def test_the_examples_leave_nothing_where_they_are_not_run():
    assert not {"words.txt", "mine.txt", "exported"} & set(os.listdir(ROOT))
