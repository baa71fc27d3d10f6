"""The model needs only jax, flax and optax, and --help imports none of these three."""

import subprocess
import sys
from typing import Any

import pytest

import txl_jax

PROGRAM = """
import sys

absent = ["tensorflow_datasets", "ml_collections", "tensorboardX", "safetensors", "array_record"]
sys.modules.update(dict.fromkeys(absent))  # importing one of them now fails

import jax
import txl_jax
import txl_jax.training.step

cfg = txl_jax.TransformerXLConfig(
    vocab_size=5, n_layer=1, d_model=4, n_head=1, d_head=4, d_inner=4
)
model = txl_jax.TransformerXL(cfg)
tokens = jax.ShapeDtypeStruct((1, 2), "int32")
shapes = jax.eval_shape(model.init, jax.random.key(0), tokens, model.init_mems(1, 2))
print(len(jax.tree.leaves(shapes)))
"""


def test_a_model_runs_where_data_logging_and_conversion_libraries_are_missing():
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == "17\n"


HEAVY = {"jax", "jaxlib", "flax", "optax", "orbax", "matplotlib", "tensorboardX", "ml_collections"}
COMMAND = """
import runpy, sys

sys.argv = ["txl", *sys.argv[1:]]
try:
    runpy.run_module("txl_jax.main", run_name="__main__")
except SystemExit:
    print("imported", *sys.modules)
"""


@pytest.mark.parametrize("words", [["--help"], ["--mode=settings"], ["--mode=tran"]])
def test_help_settings_and_wrong_flags_import_nothing_heavy(words):
    run = subprocess.run(
        [sys.executable, "-c", COMMAND, *words], capture_output=True, text=True, check=True
    )
    imported = run.stdout.splitlines()[-1].split()
    assert imported[0] == "imported", run.stdout + run.stderr
    assert "txl_jax.config" in imported
    assert not HEAVY.intersection(imported)


def test_importing_the_package_imports_nothing_heavy_until_a_name_is_used():
    program = "import sys, txl_jax; print(*sys.modules); txl_jax.Memory; print(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    before, after = (set(line.split()) for line in run.stdout.splitlines())
    assert not HEAVY & before
    assert {"jax", "flax"} <= after


def test_every_public_name_is_found_listed_and_imported_by_a_star():
    package: Any = txl_jax
    found: dict[str, Any] = {}
    exec("from txl_jax import *", found)
    assert set(txl_jax.__all__) == {name for name in found if not name.startswith("__")}
    assert set(txl_jax.__all__) <= set(dir(txl_jax))
    for name in txl_jax.__all__:
        assert getattr(package, name) is found[name]
        assert found[name].__name__.rpartition(".")[2] == name


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'TransformerXI'"):
        txl_jax.TransformerXI  # type: ignore[attr-defined]  # noqa: B018
