"""A bucket of Google Cloud Storage for tests, which an emulator serves on the loopback address."""

import importlib.util
import pathlib
import subprocess
import sys

import pytest

from txl_jax import paths

EMULATOR = pathlib.Path(__file__).with_name("gcs_emulator.py")


def forget_clients():
    """Makes the next use of a bucket connect to the address in the environment variables."""
    from etils.epath import backend

    paths.store.cache_clear()
    paths._check_bucket.cache_clear()
    backend._FileSystemSpecBackend._get_filesystem.cache_clear()
    if (gcsfs := sys.modules.get("gcsfs")) is not None:
        gcsfs.GCSFileSystem.clear_instance_cache()


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """The folder in which the emulator stores the objects of the bucket ``gs://box``."""
    for package in ("gcsfs", "gcp_storage_emulator"):  # not imported before the variables are set
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    folder = tmp_path_factory.mktemp("store")
    command = [sys.executable, str(EMULATOR), "box", str(folder)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stdout is not None
        address = f"http://127.0.0.1:{server.stdout.readline().strip()}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("STORAGE_EMULATOR_HOST", address)
            patch.setenv("TENSORSTORE_GCS_HTTP_URL", address)
            patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # true needs credentials
            forget_clients()
            yield folder / ".cloudstorage" / "box"
        server.kill()
    forget_clients()


@pytest.fixture
def place(objects, request):
    """The address of an empty folder that only this test uses."""
    name = "".join(letter if letter.isalnum() else "-" for letter in request.node.name)
    return f"gs://box/{name}"
