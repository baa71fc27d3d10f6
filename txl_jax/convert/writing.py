"""Writes a trained model for another program: its state, constructor arguments and vocabulary.

model.safetensors   the state_dict, float32
args.json           keyword arguments of MemTransformerLM (pytorch, nvidia)
config.json         the configuration of TransfoXLLMHeadModel (huggingface)
vocab.json          the run's own vocabulary, with the symbols in the order of ids
"""

import os
from typing import Literal, get_args

from txl_jax.checkpoint.saving import require_empty_folder
from txl_jax.checkpoint.trained_model import TrainedModel
from txl_jax.checkpoint.workdir_files import CONFIG, MODEL, VOCAB
from txl_jax.config.folders import expanded_text
from txl_jax.convert.arguments import require_one_of
from txl_jax.convert.huggingface import config_to_huggingface, params_to_huggingface
from txl_jax.convert.pytorch import config_to_pytorch, params_to_pytorch
from txl_jax.data.symbols import EOS
from txl_jax.evaluation.protocols import under_protocol
from txl_jax.files import atomic_write, write_json
from txl_jax.paths import make_folder

Target = Literal["pytorch", "nvidia", "huggingface"]
ARGS = "args.json"


def save_as(trained: TrainedModel, folder: str | os.PathLike[str], to: Target) -> None:
    """Writes a trained model for another program, with the lengths of the run's evaluation.

    Example:
      >>> import os, txl_jax
      >>> trained = txl_jax.load("runs/quickstart")
      >>> txl_jax.convert.save_as(trained, "for_pytorch", to="pytorch")
      >>> sorted(os.listdir("for_pytorch"))
      ['args.json', 'model.safetensors', 'vocab.json']

    Args:
      trained: a model that :func:`txl_jax.load` returned.
      folder: a new or empty folder; any other folder raises ModelFormatError.
      to: the authors' PyTorch code (pytorch), NVIDIA's, or Hugging Face's library.

    Raises:
      ModelFormatError: the program lacks a setting of the model. Nothing is written.
    """
    from safetensors.numpy import save as to_bytes  # not needed to run a model

    require_one_of("to", to, get_args(Target))
    folder = expanded_text(folder, "folder")
    require_empty_folder(folder)
    protocol = trained.config.evaluate
    cfg = under_protocol(trained.config.model, protocol)
    lengths = {"tgt_len": protocol.seg_len, "mem_len": protocol.mem_len}
    lengths["ext_len"] = protocol.context_len
    if to == "huggingface":
        symbols = trained.vocab.symbols
        args = config_to_huggingface(cfg, **lengths)
        args["eos_token_id"] = symbols.index(EOS) if EOS in symbols else None  # ends generation
        state = params_to_huggingface(trained.params, cfg)
    else:
        impl = "nvidia" if to == "nvidia" else "kimiyoung"
        args = config_to_pytorch(cfg, **lengths, impl=impl)
        state = params_to_pytorch(trained.params, cfg, impl=impl)
    make_folder(folder)
    # Hugging Face's library refuses a file without this format.
    atomic_write(os.path.join(folder, MODEL), to_bytes(state, {"format": "pt"}))
    write_json(os.path.join(folder, VOCAB), trained.vocab.to_json())
    write_json(os.path.join(folder, CONFIG if to == "huggingface" else ARGS), args)
