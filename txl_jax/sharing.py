"""A trained model by name: from a workdir, from a folder of plain files, from the Hugging Face Hub.

What is passed on is what ``python -m txl_jax.convert --export`` writes: safetensors and JSON.
"""

import os
import re
import tempfile

from txl_jax import workdir as workdirs
from txl_jax.convert.exported import load_exported, save
from txl_jax.workdir import Trained
from txl_jax.workdir_files import MODEL, WorkdirError, is_exported

_REPOSITORY = re.compile(r"(hub:)?([\w.-]+/[\w.-]+)(@([\w./-]+))?")
"""``owner/name``, ``hub:owner/name``, and ``@revision`` after it."""


def load(source: str, step: str = "best", weights: str | None = None) -> Trained:
    """A trained model: ``.model``, ``.params``, ``.vocab``, ``.config``, ``.step``.

        trained = txl_jax.load("runs/quickstart")           # a workdir
        trained = txl_jax.load("exported/")                 # what save() or --export wrote
        trained = txl_jax.load("owner/name@main")           # the Hub; needs txl_jax[hub]

    Example:
      >>> import txl_jax
      >>> trained = txl_jax.load("runs/quickstart")
      >>> tokens = trained.vocab.encode("class ")
      >>> trained.vocab.decode(tokens)
      'class '
      >>> mems = trained.model.init_mems(batch_size=1, mem_len=32)
      >>> logits, mems = trained.model.apply({"params": trained.params}, tokens[None], mems)
      >>> logits.shape == (1, 6, len(trained.vocab))
      True

    Args:
      source: an existing folder, or a repository of the Hub; ``hub:`` before it leaves no doubt.
      step: of a workdir: ``best`` by validation, ``latest``, or a number.
      weights: of a workdir: ``raw``, ``tail`` or ``exponential``; ``None``: as training chose.

    Raises:
      WorkdirError: it is neither, it holds both, or it cannot be fetched.
      CheckpointError, ConvertError: what is there is damaged or incomplete.
    """
    if os.path.isdir(source):
        if is_exported(source):
            return load_exported(source)
        return workdirs.load(source, step, weights)
    match = _REPOSITORY.fullmatch(source)
    if match and (match[1] or not source.startswith(("runs/", "./", "../"))):
        return load_exported(_fetched(match[2], match[4]))
    return workdirs.load(source, step, weights)  # which says what is missing


def push(trained: Trained, repository: str, private: bool = True) -> str:
    """Uploads a model to the Hub as ``owner/name``; its address there. Needs ``txl_jax[hub]``.

    Who is logged in there (``hf auth login``, or ``HF_TOKEN``) is the one who uploads.

    Example:
      >>> import txl_jax
      >>> trained = txl_jax.load("runs/quickstart")
      >>> txl_jax.push(trained, "owner/name")  # doctest: +SKIP

    Raises:
      WorkdirError: it cannot be uploaded; says why.
    """
    hub = _hub()
    with tempfile.TemporaryDirectory() as folder:
        save(trained, folder)
        try:
            hub.create_repo(repository, private=private, exist_ok=True)
            done = hub.upload_folder(repo_id=repository, folder_path=folder)
        except Exception as error:
            raise WorkdirError(
                f"{repository}: cannot be uploaded ({_first_line(error)})"
            ) from error
    return str(done)


def _fetched(repository: str, revision: str | None) -> str:
    hub = _hub()
    try:
        files = [MODEL, workdirs.CONFIG, workdirs.VOCAB]
        return hub.snapshot_download(repository, revision=revision, allow_patterns=files)
    except Exception as error:
        raise WorkdirError(
            f"{repository}: there is no such folder here, and it cannot be fetched from the Hub"
            f" ({_first_line(error)})"
        ) from error


def _hub():
    try:
        import huggingface_hub
    except ImportError as error:
        raise WorkdirError(
            "the Hugging Face Hub needs a package: pip install 'txl_jax[hub]'"
        ) from error
    return huggingface_hub


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
