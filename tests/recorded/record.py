"""Records results of the published PyTorch code, with which tests compare this package.

    python tests/recorded/record.py --original DIR --nvidia DIR --out tests/recorded [--only NAME]

The script needs torch and numpy, not JAX. ``--original`` is the ``pytorch/`` folder of
github.com/kimiyoung/transformer-xl, ``--nvidia`` the ``Transformer-XL/pytorch/`` folder of
NVIDIA's DeepLearningExamples. Neither folder is changed. Today's torch cannot run a few lines of
the code; they are replaced in a temporary copy (``KIMIYOUNG_FILES``, ``NVIDIA_FILES``). The script
writes ``NAME.npz`` and ``NAME.json`` for each entry of ``CASES``, and ``lamb.npz`` with
``lamb.json``. The same version of torch writes the same bytes every time.

In a run, a small model reads a stream of random tokens in ``N_SEGMENTS`` segments, and carries
memory from each segment to the next. All parameters are random, and large enough to affect the
results. Dropout is 0.

Keys of a model's arrays (the time axis is first, as in the published code):

- ``param/<name>``: the whole state, with the original's names; tied tensors have several names.
- ``seg<i>/inp`` int32 [E+T,B] and ``seg<i>/tgt`` int32 [T,B]; E is ``ext_len``.
- ``seg<i>/loss`` float32 [T,B]: nats, in the order of tokens. ``loss_f64``: the loss of the same
  run in float64. ``loss_default_order`` (only with clusters): the loss in the code's default order.
- ``seg<i>/hidden`` float32 [T*B,D]: the input of the softmax.
- ``seg<i>/mem/<l>`` float32 [filled,B,D]: memory of layer l after segment i. The authors' code has
  L+1 memories, NVIDIA's has L. There are none if ``mem_len`` is 0.
- ``grad_seg<i>/<name>``: d mean(loss of segment i) / d parameter, i > 0, memories held constant.

B batch, T segment length, D ``d_model``, L layers.
"""

import argparse
import copy
import dataclasses
import importlib.util
import json
import pathlib
import re
import sys
import tempfile
import types
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

Arrays = dict[str, np.ndarray]
Edits = Sequence[tuple[str, str]]

KIMIYOUNG_FILES: Mapping[str, tuple[str, Edits]] = {
    "mem_transformer.py": ("mem_transformer.py", [(r"\.byte\(\)", ".bool()")]),
    "utils/proj_adaptive_softmax.py": (
        "proj_adaptive_softmax.py",
        [(r"(?m)^CUDA_(MAJOR|MINOR) = .*$", "")],
    ),
    "utils/log_uniform_sampler.py": ("log_uniform_sampler.py", []),
}
"""Maps each source file to its path in the copy, and to its edits (pattern, replacement).

Masks become bool. Two unused version constants, which need CUDA, are dropped. The modules of
``utils/`` move beside the model, so that the model's imports need no edit.
"""

NVIDIA_FILES: Mapping[str, tuple[str, Edits]] = {
    "mem_transformer.py": ("mem_transformer.py", []),
    "utils/proj_adaptive_softmax.py": ("utils/proj_adaptive_softmax.py", []),
    "utils/log_uniform_sampler.py": ("utils/log_uniform_sampler.py", []),
    "lamb.py": ("lamb.py", []),
}
"""The same for NVIDIA's code, without ``utils/__init__.py``, which imports packages for GPUs."""

DEFAULTS: Mapping[str, Any] = {
    "n_token": 30,
    "n_layer": 2,
    "n_head": 2,
    "d_model": 8,
    "d_head": 3,  # N*H differs from D, unless the variant needs N*H = D
    "d_inner": 10,
    "dropout": 0.0,
    "dropatt": 0.0,
    "tie_weight": True,
    "d_embed": 8,
    "div_val": 1,
    "tie_projs": [False],
    "pre_lnorm": False,
    "tgt_len": 5,
    "ext_len": 0,
    "mem_len": 7,
    "cutoffs": [],
    "same_length": False,
    "attn_type": 0,
    "clamp_len": -1,
}
"""Constructor arguments of a case, unless its options replace them."""

CUTOFFS: Mapping[str, Any] = {"cutoffs": [10, 20], "tie_projs": [False, True, True]}
"""Three clusters of ten symbols; projections are tied as in the published wt103 recipe."""

BATCH, N_SEGMENTS = 2, 3
"""The batch size B and the number of segments of every case."""

LAMB_STEPS, LAMB_SEGMENT, LAMB_BATCH = 20, 8, 4
"""The number of updates in the run with LAMB, and the T and B of this run."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One run to record.

    Attributes:
      name: the name of the two files.
      options: constructor arguments that differ from ``DEFAULTS``.
      impl: whose code runs, ``kimiyoung`` (the authors) or ``nvidia``.
      extras: notes for the reader, and two changes after construction: ``untie_r`` (if true, u and
        v per layer) and ``reset_length`` (new values of the three lengths).
    """

    name: str
    options: Mapping[str, Any]
    impl: str = "kimiyoung"
    extras: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def constructor(self) -> dict[str, Any]:
        """Every argument of the constructor."""
        return {**DEFAULTS, **self.options}

    @property
    def lengths(self) -> dict[str, int]:
        """``tgt_len``, ``ext_len`` and ``mem_len`` of the run, after any ``reset_length``."""
        built = {k: self.constructor[k] for k in ("tgt_len", "ext_len", "mem_len")}
        return {**built, **self.extras.get("reset_length", {})}

    @property
    def seed(self) -> int:
        """A number that depends only on the name, so adding a case changes no other case."""
        return zlib.crc32(self.name.encode())


ABSOLUTE: Mapping[str, Any] = {"attn_type": 2, "mem_len": 0}
PER_LAYER: Mapping[str, Any] = {"attn_type": 3, "mem_len": 0, "d_head": 4}
CONTEXT: Mapping[str, Any] = {"ext_len": 3, "mem_len": 0}
CONTEXT_NOTE = {"note": "inputs are ext_len context tokens and the segment; loss is the segment's"}
DIV2: Mapping[str, Any] = {"div_val": 2, **CUTOFFS}
DIV4: Mapping[str, Any] = {"div_val": 4, "d_model": 16, "d_embed": 16, "n_layer": 1, **CUTOFFS}
NARROW: Mapping[str, Any] = {"d_embed": 6}

CASES = (
    Case("head_dim_differs", {"n_head": 3, "d_head": 5}),
    Case("shaw_pre_lnorm", {"attn_type": 1, "pre_lnorm": True}),
    Case("shaw_clamp", {"attn_type": 1, "clamp_len": 4}),
    Case("shaw_same_length", {"attn_type": 1, "same_length": True}),
    Case(
        "shaw_longer_than_table",
        {"attn_type": 1, "tgt_len": 3, "mem_len": 4},
        extras={
            "reset_length": {"tgt_len": 5, "ext_len": 0, "mem_len": 7},
            "note": "built with a table of tgt_len + mem_len = 7 rows, run at up to 12 keys",
        },
    ),
    Case("absolute_pre_lnorm", {**ABSOLUTE, "pre_lnorm": True}),
    Case("absolute_clamp", {**ABSOLUTE, "clamp_len": 2}),
    Case("absolute_per_layer_pre_lnorm", {**PER_LAYER, "pre_lnorm": True}),
    Case(
        "absolute_per_layer_shorter_than_table",
        {**PER_LAYER, "tgt_len": 7},
        extras={
            "reset_length": {"tgt_len": 5, "ext_len": 0, "mem_len": 0},
            "note": "built with a table of 7 rows, run at 5 keys",
        },
    ),
    Case("embed_narrow_untied_proj", NARROW),
    Case("embed_narrow_tied_proj", {**NARROW, "tie_projs": [True]}),
    Case("adaptive_div1", CUTOFFS),
    Case("adaptive_div1_narrow_mixed_projs", {**NARROW, **CUTOFFS, "tie_projs": [1, 0, 1]}),
    Case("adaptive_div2_untied_weights", {**DIV2, "tie_weight": False, "tie_projs": [0, 0, 0]}),
    Case(
        "adaptive_div2_untied_weights_tied_projs",
        {**DIV2, "tie_weight": False, "tie_projs": [1, 1, 1]},
    ),
    Case("adaptive_div2_narrow", {**DIV2, **NARROW}),
    Case("adaptive_div4_all_tied", {**DIV4, "tie_projs": [1, 1, 1]}),
    Case(
        "adaptive_pre_lnorm_clamp_same_length",
        {**DIV2, "pre_lnorm": True, "clamp_len": 4, "same_length": True},
    ),
    Case("div2_no_cutoffs", {"div_val": 2}),
    Case(
        "adaptive_untie_r",
        DIV2,
        extras={
            "untie_r": True,
            "note": "NOT in the authors' PyTorch code; their TF code's untie_r, [L,N,H]",
        },
    ),
    Case("context_relative", CONTEXT, extras=CONTEXT_NOTE),
    Case("context_absolute", {**ABSOLUTE, **CONTEXT}, extras=CONTEXT_NOTE),
    Case("context_absolute_per_layer", {**PER_LAYER, **CONTEXT}, extras=CONTEXT_NOTE),
    Case("nv_adaptive_div1", CUTOFFS, "nvidia"),
    Case(
        "nv_adaptive_div1_narrow_mixed_projs",
        {**NARROW, **CUTOFFS, "tie_projs": [1, 0, 1]},
        "nvidia",
    ),
    Case("nv_adaptive_div4_first_untied", DIV4, "nvidia"),
    Case("nv_adaptive_untied_weights", {**DIV2, "tie_weight": False}, "nvidia"),
    Case("nv_pre_lnorm_clamp", {"pre_lnorm": True, "clamp_len": 4}, "nvidia"),
    Case("nv_shaw", {"attn_type": 1}, "nvidia"),
    Case("nv_untied_softmax", {"tie_weight": False}, "nvidia"),
)

LAMB = Case(
    "lamb",
    {**DIV2, "tie_projs": [0, 1, 0], "tgt_len": LAMB_SEGMENT, "mem_len": LAMB_SEGMENT},
    "nvidia",
)


def main(argv: Sequence[str] | None = None) -> None:
    """Record every case that the flags name and print the size of each file."""
    flags = _flags(argv)
    flags.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        work = pathlib.Path(folder)
        kimiyoung = load_code(
            flags.original, work / "kimiyoung", KIMIYOUNG_FILES, "mem_transformer"
        )
        nvidia = load_code(flags.nvidia, work / "nvidia", NVIDIA_FILES, "mem_transformer", "lamb")
        code = {"kimiyoung": kimiyoung["mem_transformer"], "nvidia": nvidia["mem_transformer"]}
        for case in CASES:
            if flags.only in (None, case.name):
                _write(flags.out, case.name, *record(case, code[case.impl]))
        if flags.only in (None, LAMB.name):
            _write(flags.out, LAMB.name, *record_lamb(code["nvidia"], nvidia["lamb"]))


def record(case: Case, code: types.ModuleType) -> tuple[Arrays, dict[str, Any]]:
    """The arrays of one case and its description, as ``NAME.npz`` and ``NAME.json`` hold them."""
    rng = np.random.default_rng(case.seed)
    model = build(case, code, rng)
    state = {f"param/{name}": _numpy(value) for name, value in model.state_dict().items()}
    segments = list(_segments(case, _stream(case, rng)))
    single = run(model, case, segments)
    double = run(copy.deepcopy(model).double(), case, segments)
    exact = {f"{k}_f64": v for k, v in double.items() if k.endswith("/loss")}
    meta = {
        **_description(case, model),
        "batch_size": BATCH,
        "segment_lengths": [case.lengths["tgt_len"]] * N_SEGMENTS,
        "extras": dict(case.extras),
        "zero_grad_params_seg1": [
            k.removeprefix("grad_seg1/")
            for k, v in single.items()
            if k.startswith("grad_seg1/") and not v.any()
        ],
        "max_abs_diff_f32_vs_f64": {
            f"{what}_f32_vs_f64": _largest_difference(single, double, pattern)
            for what, pattern in (("loss", "/loss$"), ("mem", "/mem/"), ("grad", "^grad_"))
        },
    }
    return {**state, **single, **exact}, meta


def record_lamb(code: types.ModuleType, lamb: types.ModuleType) -> tuple[Arrays, dict[str, Any]]:
    """The arrays and the description of a run with NVIDIA's model and optimizer ``Lamb``.

    The small model gets ``LAMB_STEPS`` updates. Two tensors test edge cases of the trust ratio. One
    starts with a norm above 10, which the ratio limits to 10. The other one starts at zero, where
    the ratio is 1.

    Returns:
      arrays: ``init/<name>`` and ``final/<name>``, the whole state before and after; ``data``
        int32 [steps*T+1, B] (segment t is rows T*t..T*t+T, its targets are one row later);
        ``loss``, ``gnorm_before_clip`` and ``lr_used`` float64 [steps]; ``loss_f64`` from the
        same run in float64.
      description: constructor and optimizer settings.
    """
    rng = np.random.default_rng(LAMB.seed)
    model = build(LAMB, code, rng)
    with torch.no_grad():
        model.layers[0].pos_ff.CoreNet[0].weight.mul_(5)
        model.layers[1].pos_ff.CoreNet[3].bias.zero_()
    data = rng.integers(0, DEFAULTS["n_token"], (LAMB_STEPS * LAMB_SEGMENT + 1, LAMB_BATCH))
    settings = {"lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-6, "weight_decay": 0.0}
    clip = 0.25
    double = copy.deepcopy(model).double()
    init = {f"init/{name}": _numpy(value) for name, value in model.state_dict().items()}
    curves = _train(model, lamb.Lamb(model.parameters(), **settings), data, clip)
    exact = _train(double, lamb.Lamb(double.parameters(), **settings), data, clip)
    final = {f"final/{name}": _numpy(value) for name, value in model.state_dict().items()}
    final64 = {f"final/{name}": _numpy(value) for name, value in double.state_dict().items()}
    arrays: Arrays = {
        **init,
        **final,
        "data": data.astype(np.int32),
        **curves,
        "lr_used": np.full(LAMB_STEPS, settings["lr"]),
        "loss_f64": exact["loss"],
    }
    meta = {
        **_description(LAMB, model),
        "batch_size": LAMB_BATCH,
        "optimizer": "lamb",
        "steps": LAMB_STEPS,
        **settings,
        "clip": clip,
        "max_abs_diff_f32_vs_f64": {
            "loss_f32_vs_f64": _largest_difference(curves, exact, "^loss$"),
            "final_f32_vs_f64": _largest_difference(final, final64, "^final/"),
        },
        "note": (
            "constant rate; memory carried; layers.0.pos_ff.CoreNet.0.weight starts with a norm "
            "above 10, layers.1.pos_ff.CoreNet.3.bias at zero"
        ),
    }
    return arrays, meta


def build(case: Case, code: types.ModuleType, rng: np.random.Generator) -> Any:
    """The case's model in evaluation mode, with random parameters that all affect the results.

    Gains of layer norms are drawn from N(1, 0.2), all other parameters from N(0, 0.3). This
    includes cluster weights, projections and all biases. At their usual initial value of zero, an
    error in them would not show.
    """
    needed = {"dtype": None} if case.impl == "nvidia" else {}  # required there, and unused
    model = code.MemTransformerLM(**case.constructor, **needed)
    if case.extras.get("untie_r"):
        _untie_r(model)
    for name, parameter in model.named_parameters():
        value = rng.normal(0.0, 0.3, parameter.shape)
        if name.endswith("layer_norm.weight"):
            value = 1 + value * 2 / 3
        parameter.data.copy_(torch.from_numpy(value))
    model.reset_length(**case.lengths)
    return model.eval()


def run(model: Any, case: Case, segments: Sequence[tuple[np.ndarray, np.ndarray]]) -> Arrays:
    """Run the model on segments with carried memory. The module's docstring explains the keys."""
    arrays: Arrays = {}
    softmax_inputs: list[Any] = []
    watch = model.crit.register_forward_pre_hook(lambda _, args: softmax_inputs.append(args[0]))
    parameters = dict(model.named_parameters())
    mems: Any = None
    for i, (inp, tgt) in enumerate(segments):
        tokens = torch.from_numpy(inp.astype(np.int64)), torch.from_numpy(tgt.astype(np.int64))
        arrays |= {f"seg{i}/inp": inp, f"seg{i}/tgt": tgt}
        if case.constructor["cutoffs"]:
            model.crit.keep_order = False
            arrays[f"seg{i}/loss_default_order"] = _numpy(_forward(model, case, *tokens, mems)[0])
            model.crit.keep_order = True
        loss, mems = _forward(model, case, *tokens, mems)
        arrays[f"seg{i}/loss"] = _numpy(loss)
        arrays[f"seg{i}/hidden"] = _numpy(softmax_inputs[-1])
        for layer, states in enumerate(() if mems is None else mems):
            arrays[f"seg{i}/mem/{layer}"] = _numpy(states)
        if i > 0:
            gradient = torch.autograd.grad(loss.mean(), list(parameters.values()))
            for name, value in zip(parameters, gradient, strict=True):
                arrays[f"grad_seg{i}/{name}"] = _numpy(value)
    watch.remove()
    return arrays


def _forward(model: Any, case: Case, inp: Any, tgt: Any, mems: Any) -> tuple[Any, Any]:
    """Loss [T,B] and new memories; ``mems`` None is the start of a stream, or no memory at all."""
    if case.impl == "nvidia":
        return model(inp, tgt, mems)
    loss, *new = model(inp, tgt, *(() if mems is None else mems))
    return loss, new or None


def _train(model: Any, optimizer: Any, data: np.ndarray, clip: float) -> Arrays:
    """Train ``model``; return mean loss and gradient norm of every update, float64 [steps]."""
    losses, norms, mems = [], [], None
    model.train()
    tokens = torch.from_numpy(data)
    for start in range(0, len(data) - 1, LAMB_SEGMENT):
        stop = start + LAMB_SEGMENT
        model.zero_grad()
        loss, mems = model(tokens[start:stop], tokens[start + 1 : stop + 1], mems)
        loss.mean().backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This overload of add", UserWarning)
            optimizer.step()
        losses.append(float(loss.detach().mean()))
    return {"loss": np.array(losses), "gnorm_before_clip": np.array(norms)}


def _untie_r(model: Any) -> None:
    """Give every layer its own u and v: [N,H] becomes [L,N,H], layer l reads row l."""
    for name in ("r_w_bias", "r_r_bias"):
        shape = (len(model.layers), *getattr(model, name).shape)
        setattr(model, name, torch.nn.Parameter(torch.zeros(shape)))
    for n, layer in enumerate(model.layers):
        layer.register_forward_pre_hook(
            lambda _, args, n=n: (*args[:2], args[2][n], args[3][n], *args[4:])
        )


def _stream(case: Case, rng: np.random.Generator) -> np.ndarray:
    """Random tokens int32 [E+3T+1, B]; every segment's inputs and targets cover all clusters."""
    bounds = case.constructor["cutoffs"]
    rows = case.lengths["ext_len"] + N_SEGMENTS * case.lengths["tgt_len"] + 1
    while True:
        stream = rng.integers(0, case.constructor["n_token"], (rows, BATCH), dtype=np.int32)
        met = [
            len(np.unique(np.searchsorted(bounds, part, side="right")))
            for segment in _segments(case, stream)
            for part in segment
        ]
        if min(met) == len(bounds) + 1:
            return stream


def _segments(case: Case, stream: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Inputs [E+T,B] and targets [T,B] of every segment, the targets one token later."""
    context, length = case.lengths["ext_len"], case.lengths["tgt_len"]
    for start in range(0, N_SEGMENTS * length, length):
        stop = start + context + length
        yield stream[start:stop], stream[stop - length + 1 : stop + 1]


def _description(case: Case, model: Any) -> dict[str, Any]:
    """Describe a run: its settings, its parameters, and which names belong to the same tensor."""
    first: dict[int, str] = {}
    aliases = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            aliases[name] = first[id(parameter)]
        else:
            first[id(parameter)] = name
    constructor = case.constructor
    return {
        "name": case.name,
        "impl": case.impl,
        "constructor": {**constructor, "tie_projs": [bool(t) for t in constructor["tie_projs"]]},
        "n_params": sum(p.numel() for p in model.parameters()),
        "parameter_names": list(first.values()),
        "tied_aliases": aliases,
        "data_seed": case.seed,
        "torch": torch.__version__,
    }


def load_code(
    source: pathlib.Path,
    copied: pathlib.Path,
    files: Mapping[str, tuple[str, Edits]],
    *modules: str,
) -> dict[str, types.ModuleType]:
    """Import ``modules`` from an edited copy of ``files``.

    Raises:
      ValueError: an edit found nothing to replace, so the code is of another version.
    """
    for name, (place, edits) in files.items():
        text = (source / name).read_text()
        for pattern, replacement in edits:
            text, count = re.subn(pattern, replacement, text)
            if not count:
                raise ValueError(f"{source / name}: nothing matches {pattern!r}")
        (copied / place).parent.mkdir(parents=True, exist_ok=True)
        (copied / place).write_text(text)
    sys.path.insert(0, str(copied))
    return {module: _import(copied, module) for module in modules}


def _import(folder: pathlib.Path, module: str) -> types.ModuleType:
    """Import ``module`` under the name FOLDER_MODULE, since both codes have equal module names."""
    name = f"{folder.name}_{module}"
    spec = importlib.util.spec_from_file_location(name, folder / f"{module}.py")
    assert spec is not None
    assert spec.loader is not None
    imported = importlib.util.module_from_spec(spec)
    sys.modules[name] = imported
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.jit.*", DeprecationWarning)
        spec.loader.exec_module(imported)
    return imported


def _write(out: pathlib.Path, name: str, arrays: Arrays, meta: Mapping[str, Any]) -> None:
    """Write ``NAME.npz`` and ``NAME.json``, and print how large and how exact they are."""
    target = out / f"{name}.npz"
    np.savez_compressed(target, **arrays)  # type: ignore[arg-type]
    (out / f"{name}.json").write_text(json.dumps(meta, indent=1) + "\n")
    print(f"{target.stat().st_size:7d} bytes  {name}  {meta['max_abs_diff_f32_vs_f64']}")


def _largest_difference(a: Arrays, b: Arrays, pattern: str) -> float:
    """max|a - b| over the keys that ``pattern`` finds; 0 where it finds none."""
    keys = [k for k in a if re.search(pattern, k)]
    return max((float(np.abs(a[k] - b[k]).max()) for k in keys), default=0.0)


def _numpy(tensor: Any) -> np.ndarray:
    """Return a copy, since the published code changes some tensors in place."""
    return tensor.detach().numpy().copy()


def _flags(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [case.name for case in (*CASES, LAMB)]
    parser.add_argument("--original", type=pathlib.Path, required=True, help="the authors' folder")
    parser.add_argument("--nvidia", type=pathlib.Path, required=True, help="NVIDIA's folder")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="where the files go")
    parser.add_argument("--only", choices=names, metavar="NAME", help="record this one alone")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
