"""Records results of the authors' TensorFlow code and of Hugging Face's TransfoXL as arrays.

    python tests/recorded/record_others.py tensorflow --original=DIR --out=tests/recorded/others
    python tests/recorded/record_others.py huggingface --out=tests/recorded/others

Each run writes ``NAME.npz`` and ``NAME.json``. The JSON file has the program, its arguments (flags,
or ``config.json``) and versions. Keys of the arrays (time is the first axis of memories only):

    param/<name>        every variable or tensor, by the program's own name
    seg<i>/inp          int32 [B,T]; segment i of three, with memory carried along
    seg<i>/tgt, loss    TF: targets, and the mean loss in nats over the segment
    seg<i>/logp         Hugging Face: log-probabilities [B,T,V]
    seg<i>/mem/<l>      [M,B,D]: memory of layer l after the segment; it starts as zeros
"""

import argparse
import importlib.util
import json
import os
import sys
import types

import numpy as np

B, T, M, V = 2, 5, 7, 23
SHAPE = {"n_layer": 2, "d_model": 8, "n_head": 2, "d_head": 3, "d_inner": 10}
CUT = {"cutoffs": [7, 15]}

TENSORFLOW: dict[str, dict] = {
    "tf_plain": {},
    "tf_narrow": {"d_embed": 6, "clamp_len": 4},
    "tf_div1_shared": {**CUT, "d_embed": 6, "proj_share_all_but_first": True, "same_length": True},
    "tf_div2_shared": {**CUT, "div_val": 2, "proj_share_all_but_first": True, "untie_r": True},
    "tf_div2_no_same_size": {**CUT, "div_val": 2, "proj_same_dim": False, "untie_r": True},
}

HUGGINGFACE: dict[str, dict] = {
    "hf_div2": {**CUT, "div_val": 2},
    "hf_div1_narrow": {**CUT, "div_val": 1, "d_embed": 6, "clamp_len": 4},
    "hf_shared_bias": {**CUT, "div_val": 2, "untie_r": False, "same_length": False},
    "hf_untied_projections": {**CUT, "div_val": 2, "proj_share_all_but_first": False},
}


def draw(rng, name, shape):
    """Random values, large enough for a misplaced one to change results; gains are around 1."""
    gain = name.endswith(("gamma", "layer_norm.weight"))
    return (gain + 0.3 * rng.standard_normal(shape)).astype(np.float32)


def segments(rng):
    """Random inputs and targets, [3,B,T] each."""
    text = rng.integers(0, V, (B, 3 * T + 1)).astype(np.int32)
    cut = lambda text: text.reshape(B, 3, T).swapaxes(0, 1)
    return cut(text[:, :-1]), cut(text[:, 1:])


def write(out, name, arrays, about):
    """Writes both files of a recording."""
    np.savez_compressed(os.path.join(out, name + ".npz"), **arrays)
    with open(os.path.join(out, name + ".json"), "w", encoding="utf-8") as file:
        file.write(json.dumps(about, indent=1) + "\n")


# --------------------------------------------------------------------------------------
# Functions of TensorFlow 1 that model.py calls, and that TensorFlow 2 lacks.


def tensorflow_1(tf):
    """A stand-in for TF 1's module: ``tf.compat.v1`` with dense layers, dropout and layer_norm."""
    v1 = tf.compat.v1

    def dense(x, units, activation=None, use_bias=True, kernel_initializer=None, name=None):
        with v1.variable_scope(name):
            shape = [x.shape[-1], units]
            y = tf.tensordot(x, v1.get_variable("kernel", shape), [[-1], [0]])
            y = y + v1.get_variable("bias", [units]) if use_bias else y
        return activation(y) if activation else y

    def layer_norm(x, begin_norm_axis=-1):
        """``tf.contrib.layers.layer_norm`` of TF 1.12: epsilon 1e-12."""
        with v1.variable_scope("LayerNorm"):
            beta = v1.get_variable("beta", x.shape[-1:])
            gamma = v1.get_variable("gamma", x.shape[-1:])
        mean, variance = tf.nn.moments(x, [-1], keepdims=True)
        return tf.nn.batch_normalization(x, mean, variance, beta, gamma, 1e-12)

    class Module(types.ModuleType):
        def __getattr__(self, name):
            return getattr(v1, name)

    module = Module("tensorflow")
    vars(module)["layers"] = types.SimpleNamespace(dense=dense, dropout=lambda x, *a, **k: x)
    norm = types.SimpleNamespace(layer_norm=layer_norm)
    vars(module)["contrib"] = types.SimpleNamespace(layers=norm)
    return module


def original_model(tf, folder):
    """Imports the authors' ``model.py`` with :func:`tensorflow_1` in place of TensorFlow."""
    spec = importlib.util.spec_from_file_location("model", os.path.join(folder, "model.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tensorflow"], real = tensorflow_1(tf), sys.modules["tensorflow"]
    spec.loader.exec_module(module)
    sys.modules["tensorflow"] = real
    return module


def record_tensorflow(folder, out):
    """Writes all recordings of the TF code."""
    import tensorflow as tf

    v1, original = tf.compat.v1, original_model(tf, folder)
    v1.disable_eager_execution()
    for name, flags in TENSORFLOW.items():
        args = {**SHAPE, "d_embed": 8, "n_token": V, "cutoffs": [], "dropout": 0.0, **flags}
        call = {k: v for k, v in args.items() if k != "proj_share_all_but_first"}
        share = args.get("proj_share_all_but_first", False)
        tie = [False] + [share] * len(args["cutoffs"])
        rng = np.random.default_rng(0)
        arrays: dict[str, np.ndarray] = {}
        with v1.Graph().as_default(), v1.Session() as session:
            inp, tgt = (v1.placeholder(tf.int32, [T, B]) for _ in range(2))
            size = [M, B, SHAPE["d_model"]]
            mems = [v1.placeholder(tf.float32, size) for _ in range(SHAPE["n_layer"])]
            loss, new = original.transformer(
                inp, tgt, mems, **call, dropatt=0.0, tie_projs=tie, mem_len=M, initializer=None,
                is_training=False, use_tpu=False,
            )  # fmt: skip
            session.run(v1.global_variables_initializer())
            for variable in v1.trainable_variables():
                key = variable.name.removesuffix(":0")
                arrays[f"param/{key}"] = draw(rng, key, variable.shape)
                variable.load(arrays[f"param/{key}"], session)
            states = [np.zeros(size, np.float32)] * SHAPE["n_layer"]
            for i, (x, y) in enumerate(zip(*segments(rng), strict=True)):
                feed = {inp: x.T, tgt: y.T, **dict(zip(mems, states, strict=True))}
                value, states = session.run([loss, new], feed)
                # without cutoffs the original gives the loss of each token, not their mean
                arrays |= {f"seg{i}/inp": x, f"seg{i}/tgt": y, f"seg{i}/loss": np.mean(value)}
                arrays |= {f"seg{i}/mem/{n}": state for n, state in enumerate(states)}
        about = {"program": "tensorflow", "args": {**args, "mem_len": M, "dropatt": 0.0}}
        write(out, name, arrays, {**about, "versions": {"tensorflow": tf.__version__}})


def record_huggingface(out):
    """Writes all recordings of Hugging Face's code."""
    import torch
    import transformers

    for name, settings in HUGGINGFACE.items():
        shape = {**SHAPE, "d_embed": 8, "vocab_size": V, "mem_len": M, "dropout": 0.0}
        config = transformers.TransfoXLConfig(**{**shape, "clamp_len": -1, **settings})
        model = transformers.TransfoXLLMHeadModel(config).eval()
        rng, mems = np.random.default_rng(0), None
        arrays: dict[str, np.ndarray] = {}
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                parameter.copy_(torch.tensor(draw(rng, key, parameter.shape)))
            arrays |= {f"param/{key}": value.numpy() for key, value in model.state_dict().items()}
            for i, x in enumerate(segments(rng)[0]):
                result = model(input_ids=torch.tensor(x, dtype=torch.long), mems=mems)
                mems = result.mems
                arrays |= {f"seg{i}/inp": x, f"seg{i}/logp": result.prediction_scores.numpy()}
                arrays |= {f"seg{i}/mem/{n}": state.numpy() for n, state in enumerate(mems)}
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        about = {"program": "huggingface", "args": config.to_dict(), "versions": versions}
        write(out, name, arrays, about)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("program", choices=["tensorflow", "huggingface"])
    parser.add_argument("--original", help="the authors' folder tf/")
    parser.add_argument("--out", required=True)
    given = parser.parse_args()
    if given.program == "tensorflow":
        record_tensorflow(given.original, given.out)
    else:
        record_huggingface(given.out)
