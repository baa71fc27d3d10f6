"""Random model states with the parameter names and shapes that other programs use.

:func:`pytorch` follows the authors' PyTorch code. The other functions return the same values with
the names and the layout of NVIDIA's program, of the authors' TF code and of Hugging Face's program.
All four states must therefore convert to the same model.
"""

import numpy as np

from txl_jax.model.adaptive import clusters


def pytorch(c, seed=0):
    """A random ``state_dict`` of the authors' ``MemTransformerLM`` for the model settings ``c``.

    A tied tensor is in it under each of its names.
    """
    d, heads, big = c.d_model, c.n_head * c.d_head, c.d_embed or c.d_model
    per_layer = (c.n_layer,) if c.untie_r else ()
    rows = (c.n_layer, c.n_positions, c.n_head)
    of_form: dict[str, dict[str, tuple[int, ...]]] = {
        "relative": {
            "r_w_bias": (*per_layer, c.n_head, c.d_head),
            "r_r_bias": (*per_layer, c.n_head, c.d_head),
            "pos_emb.inv_freq": (d // 2,),
        },
        "shaw": {
            "r_emb": (*rows, c.d_head),
            "r_w_bias": (c.n_layer, c.n_head, c.d_head),
            "r_bias": rows,
        },
        "absolute": {"pos_emb.inv_freq": (d // 2,)},
        "absolute_per_layer": {"r_emb": (*rows, c.d_head)},
    }
    shapes, alias = dict(of_form[c.attention]), {}
    parts = [(p.size, p.width) for p in clusters(c)]
    for i, (size, width) in enumerate(parts if c.div_val > 1 else [(c.vocab_size, big)]):
        shapes[f"word_emb.emb_layers.{i}.weight"] = (size, width)
        shapes[f"crit.out_layers.{i}.bias"] = (size,)
        shapes[f"crit.out_layers.{i}.weight"] = (size, width)
        if c.tie_weight:
            alias[f"crit.out_layers.{i}.weight"] = f"word_emb.emb_layers.{i}.weight"
        if c.div_val > 1 or big != d:
            shapes[f"word_emb.emb_projs.{i}"] = (d, width)
    if c.div_val > 1 or big != d:
        for i, (_, width) in enumerate(parts):
            shapes[f"crit.out_projs.{i}"] = (d, width)
            if (*c.tie_projs, *[False] * len(parts))[i]:
                alias[f"crit.out_projs.{i}"] = f"word_emb.emb_projs.{i if c.div_val > 1 else 0}"
    if c.cutoffs:
        shapes["crit.cluster_weight"] = (len(c.cutoffs), big)
        shapes["crit.cluster_bias"] = (len(c.cutoffs),)
    into_heads = {"q_net": heads, "kv_net": 2 * heads}
    if not c.memory_free:
        into_heads = {"qkv_net": 3 * heads} | ({"r_net": heads} if c.attention != "shaw" else {})
    for n in range(c.n_layer):
        shapes |= {f"layers.{n}.dec_attn.{k}.weight": (rows, d) for k, rows in into_heads.items()}
        shapes |= {
            f"layers.{n}.dec_attn.o_net.weight": (d, heads),
            f"layers.{n}.dec_attn.layer_norm.weight": (d,),
            f"layers.{n}.dec_attn.layer_norm.bias": (d,),
            f"layers.{n}.pos_ff.CoreNet.0.weight": (c.d_inner, d),
            f"layers.{n}.pos_ff.CoreNet.0.bias": (c.d_inner,),
            f"layers.{n}.pos_ff.CoreNet.3.weight": (d, c.d_inner),
            f"layers.{n}.pos_ff.CoreNet.3.bias": (d,),
            f"layers.{n}.pos_ff.layer_norm.weight": (d,),
            f"layers.{n}.pos_ff.layer_norm.bias": (d,),
        }
    rng = np.random.default_rng(seed)
    state = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    return state | {name: state[of] for name, of in alias.items()}


def nvidia(c, seed=0):
    """The values of :func:`pytorch` under the names that NVIDIA's program uses.

    An output projection that is tied to the embedding's is in ``shared_out_projs``, not in
    ``out_projs``. With ``absolute_per_layer``, the last axis of ``r_emb`` has all N heads of size
    H, [N*H], while :func:`pytorch` has two axes [N,H].
    """
    state = {}
    for name, array in pytorch(c, seed).items():
        kind, _, i = name.removeprefix("crit.").removesuffix(".bias").partition(".")
        if name.startswith("crit.out_layers.") and name.endswith(".bias"):
            state[f"crit.out_layers_biases.{i}"] = array
        elif name.startswith("crit.out_layers."):
            if not c.tie_weight:
                state[f"crit.out_layers_weights.{i.removesuffix('.weight')}"] = array
        elif kind == "out_projs" and (*c.tie_projs, *[False] * 9)[int(i)]:
            continue
        elif name == "r_emb" and c.attention == "absolute_per_layer":
            state[name] = array.reshape(*array.shape[:2], -1)
        else:
            state[name] = array
        if name.startswith("word_emb.emb_projs."):
            state[name.replace("word_emb.emb_projs", "crit.shared_out_projs")] = array
    return state


def huggingface(c, seed=0):
    """The values of :func:`pytorch` under the names of Hugging Face's ``TransfoXLLMHeadModel``."""
    state = {}
    for name, array in pytorch(c, seed).items():
        if name in ("r_w_bias", "r_r_bias"):
            for n in range(c.n_layer):
                own = array[n] if c.untie_r else array
                state[f"transformer.layers.{n}.dec_attn.{name}"] = own
            if not c.untie_r:
                state["transformer." + name] = array
        elif name.startswith("crit.cluster_"):
            state[name] = array[::-1]  # tail cluster i has row i - 1 here, row -i in pytorch()
        elif name.startswith("crit."):
            state[name] = array
        else:
            state["transformer." + name] = array
    return state


def tensorflow(c, seed=0):
    """The values of :func:`pytorch` as a checkpoint of the authors' TF code.

    It includes the variables of the optimizer. Embedding and softmax share their weights. Between
    equal widths, the TF code has a projection only with clusters of several widths and
    ``proj_same_dim``.
    """
    pt, tf = pytorch(c, seed), {}
    has = lambda width: width != c.d_model or (c.div_val > 1 and c.proj_same_dim)
    parts = [(p.start, p.stop, p.width) for p in clusters(c)]
    tied = (*c.tie_projs, *[False] * len(parts))
    if c.div_val == 1:
        tf["adaptive_embed/lookup_table"] = pt["word_emb.emb_layers.0.weight"]
        if has(parts[0][2]):
            tf["adaptive_embed/proj_W"] = pt["word_emb.emb_projs.0"].T
    for i, (start, stop, width) in enumerate(parts):
        softmax, embed = f"adaptive_softmax/cutoff_{i}/", f"adaptive_embed/cutoff_{i}/"
        if c.div_val > 1:
            tf[embed + "lookup_table"] = pt[f"word_emb.emb_layers.{i}.weight"]
            tf[softmax + "b"] = pt[f"crit.out_layers.{i}.bias"]
            if has(width):
                tf[embed + "proj_W"] = pt[f"word_emb.emb_projs.{i}"].T
        elif c.cutoffs:
            tf[softmax + "b"] = pt["crit.out_layers.0.bias"][start:stop]
        else:
            tf["adaptive_softmax/bias"] = pt["crit.out_layers.0.bias"]
        if has(width) and not tied[i]:
            tf[softmax + "proj"] = pt[f"crit.out_projs.{i}"].T
    if c.cutoffs:
        tf["adaptive_softmax/cutoff_0/cluster_W"] = pt["crit.cluster_weight"][::-1]
        tf["adaptive_softmax/cutoff_0/cluster_b"] = pt["crit.cluster_bias"][::-1]
    tf |= {name: pt[name] for name in ("r_w_bias", "r_r_bias")}
    for n in range(c.n_layer):
        theirs, ours = f"layers.{n}.", f"layer_{n}/"
        tf |= {
            ours + "rel_attn/qkv/kernel": pt[theirs + "dec_attn.qkv_net.weight"].T,
            ours + "rel_attn/r/kernel": pt[theirs + "dec_attn.r_net.weight"].T,
            ours + "rel_attn/o/kernel": pt[theirs + "dec_attn.o_net.weight"].T,
            ours + "rel_attn/LayerNorm/gamma": pt[theirs + "dec_attn.layer_norm.weight"],
            ours + "rel_attn/LayerNorm/beta": pt[theirs + "dec_attn.layer_norm.bias"],
            ours + "ff/layer_1/kernel": pt[theirs + "pos_ff.CoreNet.0.weight"].T,
            ours + "ff/layer_1/bias": pt[theirs + "pos_ff.CoreNet.0.bias"],
            ours + "ff/layer_2/kernel": pt[theirs + "pos_ff.CoreNet.3.weight"].T,
            ours + "ff/layer_2/bias": pt[theirs + "pos_ff.CoreNet.3.bias"],
            ours + "ff/LayerNorm/gamma": pt[theirs + "pos_ff.layer_norm.weight"],
            ours + "ff/LayerNorm/beta": pt[theirs + "pos_ff.layer_norm.bias"],
        }
    tf = {f"transformer/{name}": array for name, array in tf.items()}
    slots = {f"{name}/{slot}": array for name, array in tf.items() for slot in ("Adam", "Adam_1")}
    scalars = {name: np.zeros(()) for name in ("global_step", "beta1_power", "beta2_power")}
    return tf | slots | scalars
