"""Tables that relate the tensors of another program to the parameters of this project.

A table is a list of :class:`Entry`. :func:`read_params` uses it to convert a state of that program
to parameters of this project. :func:`write_state` uses it to convert parameters to a state.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import unflatten_dict

from txl_jax.checkpoint.tensors import Tensors, flat_params
from txl_jax.config import TransformerXLConfig
from txl_jax.model.layout import unstack_layers

View = Callable[[np.ndarray], np.ndarray]


class Entry(NamedTuple):
    """A tensor of another program, and its places in this project's parameters.

    Attributes:
      name: the tensor's name in that program.
      shape: the tensor's shape there.
      places: for each parameter's path, the :func:`view` of the tensor that equals the parameter.
        If several entries have the same path, the parameter is the concatenation of their views on
        the first axis.
      aliases: other names of the same tensor, each with the reason. A state that is read can lack
        some of the names. A state that is written has all names.
    """

    name: str
    shape: tuple[int, ...]
    places: Mapping[str, View]
    aliases: Mapping[str, str] = {}


def view(*shape: int, part: Any = (), transposed: bool = False) -> View:
    """Returns a function that takes a tensor and returns a part of it, reshaped, without a copy.

    The function transposes the tensor if ``transposed``, reshapes it to ``shape`` if one is given,
    and takes the index ``part``. An assignment to the view changes the tensor.
    """

    def of(tensor: np.ndarray) -> np.ndarray:
        turned = tensor.T if transposed else tensor
        return (turned.reshape(shape) if shape else turned)[part]

    return of


def read_params(
    table: Sequence[Entry], state: Mapping[str, Any], ignored: Iterable[str] = ()
) -> dict[str, Any]:
    """Converts a state to the tree of parameters, float32.

    Raises ModelFormatError, which names all tensors that are missing or unknown (except those
    ``ignored``), have a wrong shape, or differ from another name of the same tensor.
    """
    tensors = Tensors(state)
    views = _views(table, lambda entry: _take(tensors, entry))
    tensors.finish(ignored)
    params = {path: np.concatenate(v) if len(v) > 1 else v[0] for path, v in views.items()}
    return unflatten_dict(params, sep="/")


def write_state(table: Sequence[Entry], params: Any) -> dict[str, np.ndarray]:
    """Converts parameters, stacked or not, to a state: float32 arrays by name, with all aliases.

    Raises ModelFormatError, which names all parameters that are missing, have a wrong shape, or
    have no place in the table.
    """
    state = {entry.name: np.empty(entry.shape, np.float32) for entry in table}
    left = Tensors(flat_params(unstack_layers(params)))
    for path, views in _views(table, lambda entry: state[entry.name]).items():
        rows = [len(part) for part in views]
        param = left.take(path, (sum(rows), *views[0].shape[1:]))
        for part, value in zip(views, np.split(param, np.cumsum(rows[:-1])), strict=True):
            part[...] = value
    left.finish()
    return state | {alias: state[entry.name] for entry in table for alias in entry.aliases}


def _views(
    table: Sequence[Entry], tensor_of: Callable[[Entry], np.ndarray]
) -> dict[str, list[np.ndarray]]:
    """Returns the views of each parameter, in the order of the table."""
    found: dict[str, list[np.ndarray]] = {}
    for entry in table:
        tensor = tensor_of(entry)
        for path, of in entry.places.items():
            found.setdefault(path, []).append(of(tensor))
    return found


def _take(tensors: Tensors, entry: Entry) -> Any:
    """Returns a tensor under the first of its names in the state, and checks the other names."""
    names = (entry.name, *entry.aliases)
    first = next((name for name in names if name in tensors), entry.name)
    tensor = tensors.take(first, entry.shape)
    for alias, why in entry.aliases.items():
        tensors.alias(alias, first, tensor, why)
    return tensor


def layer_entries(
    c: TransformerXLConfig, names: Mapping[str, str], layer: str, prefix: str, transposed: bool
) -> list[Entry]:
    """Lists the tensors of a layer that all programs have.

    ``names`` maps parameter paths of this project to tensor names, without the paths' ``layer`` and
    the names' ``prefix``. ``qkv`` is the tensor of queries, keys and values; models without memory
    have ``q`` and ``kv``. Kernels are stored as [out, in] if ``transposed``.
    """
    d, n, h, f = c.d_model, c.n_head, c.d_head, c.d_inner
    joined = {"q": ("query",), "kv": ("key", "value")}
    joined = joined if c.memory_free else {"qkv": ("query", "key", "value")}
    dense, norms = "feed_forward", ("norm_attention", "norm_feed_forward")
    single: dict[str, tuple[int, ...]] = {
        **({"attention/position": (d, n, h)} if c.attention == "relative" else {}),
        "attention/output": (n, h, d),
        **{f"{dense}/inner/kernel": (d, f), f"{dense}/inner/bias": (f,)},
        **{f"{dense}/outer/kernel": (f, d), f"{dense}/outer/bias": (d,)},
        **{f"{norm}/{part}": (d,) for norm in norms for part in ("scale", "bias")},
    }
    stored = {"attention/position": (d, n * h), "attention/output": (n * h, d)}
    entries = []

    def add(key: str, shape: tuple[int, ...], places: Mapping[str, View]) -> None:
        entries.append(Entry(prefix + names[key], shape[::-1] if transposed else shape, places))

    for key, kinds in joined.items():
        of = lambda i: view(d, -1, n, h, part=np.s_[:, i], transposed=transposed)
        places = {f"{layer}/attention/{kind}": of(i) for i, kind in enumerate(kinds)}
        add(key, (d, len(kinds) * n * h), places)
    for path, shape in single.items():
        places = {f"{layer}/{path}": view(*shape, transposed=transposed)}
        add(path, stored.get(path, shape), places)
    return entries
