"""The model and its step need jax, flax and optax alone; the rest is imported where it is used."""

import subprocess
import sys

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
