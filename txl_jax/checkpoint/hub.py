"""Models on the Hugging Face Hub: what :func:`txl_jax.save` writes, uploaded and fetched."""

import tempfile

from txl_jax.checkpoint.errors import WorkdirError
from txl_jax.checkpoint.exported import save
from txl_jax.checkpoint.trained_model import TrainedModel
from txl_jax.checkpoint.workdir_files import CONFIG, MODEL, VOCAB


def push(trained: TrainedModel, repository: str, private: bool = True) -> str:
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


def fetched(repository: str, revision: str | None) -> str:
    """The folder of a model downloaded from the Hub; raises WorkdirError, saying why."""
    hub = _hub()
    try:
        files = [MODEL, CONFIG, VOCAB]
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
