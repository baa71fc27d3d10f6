"""Set-up of every test: eight CPU devices, no files outside temporary folders.

Most settings here are environment variables, because programs that tests start need them too.
Variables that are already set are kept, so ``JAX_PLATFORMS=cuda pytest -m gpu`` reaches a GPU.
``setup.cfg`` says which tests run by default.
"""

import contextlib
import ctypes
import gc
import importlib.metadata
import os
import pathlib
import shutil
import tempfile

from packaging.version import Version

ROOT = pathlib.Path(__file__).resolve().parents[1]
SCRATCH = tempfile.mkdtemp(prefix="txl_jax_tests_")

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TXL_DATA_DIR", os.path.join(SCRATCH, "data"))
# Tests trace the same small programs again and again; a program in this cache compiles in a
# tenth of the time (measured: 14 s -> 1.4 s for the gradient of a 3-layer model).
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.join(SCRATCH, "compiled"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
# Most of a test's time is compilation, and the programs are too small to gain from optimisation.
# With this variable set to 0, the tests compile their programs as users do.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# JAX looks up the source line of every operation, which takes time, and no test reads it.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# Half of the compile time is XLA's fusion emitters; older versions can switch them off
# (measured: 9.6 s -> 3.9 s for the train step of a 2-layer model). The programs are also too small
# to gain from compiling their parts in parallel.
EARLIER = Version(importlib.metadata.version("jaxlib")) < Version("0.11.1")
if os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1" and EARLIER:
    whole = "--xla_cpu_parallel_codegen_split_count=1"
    flags = (os.environ.get("XLA_FLAGS"), "--xla_cpu_use_fusion_emitters=false", whole)
    os.environ["XLA_FLAGS"] = " ".join(filter(None, flags))
# Without this flag, eight devices can wait for each other for ever. The reason is in
# txl_jax/parallel/accelerators.py, ``order_collectives``.
IN_ORDER = "--xla_cpu_enable_concurrency_optimized_scheduler=false"
os.environ["XLA_FLAGS"] = " ".join(filter(None, (os.environ.get("XLA_FLAGS"), IN_ORDER)))
os.environ.setdefault("PJRT_NPROC", "24")  # threads of XLA, for the same reason
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
)

import jax  # noqa: E402  (reads the environment when imported)
import pytest  # noqa: E402

HELPERS = sorted(file.stem for file in (ROOT / "tests" / "helpers").glob("*.py"))
pytest.register_assert_rewrite(*HELPERS)
# Modules with fixtures that several test modules use.
pytest_plugins = [
    "absent_devices",
    "corpus_files",
    "gcs_store",
    "interpreted_kernels",
    "trained_run",
]

jax.config.update("jax_num_cpu_devices", 8)
# Traced programs are many long-lived small objects, and JAX adds work to each garbage collection.
gc.set_threshold(200_000, 20, 100)


with contextlib.suppress(ImportError, AttributeError):  # absent in some versions of JAX
    from jax._src.interpreters import mlir

    # JAX loads its MLIR dialects for each of the thousands of small programs that tests compile
    # (measured: 4 ms each, and 8% of the processor time of the default tests).
    DIALECTS = mlir.make_ir_context()
    mlir.make_ir_context = lambda: DIALECTS


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks as slow what ``few(n)`` leaves out: all but n cases of an integration test.

    The n cases are spread evenly over all of them, so that each kind of case is among them.
    """
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("integration") and not item.get_closest_marker("slow"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        if few := cases[0].get_closest_marker("few"):
            n = few.args[0]
            kept = {round(i * (len(cases) - 1) / max(1, n - 1)) for i in range(n)}
            for i, item in enumerate(cases):
                if i not in kept:
                    item.add_marker(pytest.mark.slow)


LARGE = 4 << 30  # bytes


def _resident() -> int:
    """Returns the memory of this process in bytes, or ``LARGE`` where /proc does not say."""
    try:
        pages = pathlib.Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return LARGE
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(autouse=True, scope="module")
def _give_memory_back():
    """Frees the memory that a test module leaves; without this, a test worker grew to 6 GB.

    JAX keeps traced and compiled programs, and glibc keeps freed memory in its arenas. Freeing
    takes time, and modules share small programs, so only a worker that has become large does it.
    """
    yield
    if _resident() < LARGE:
        return
    jax.clear_caches()
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)


@pytest.fixture
def as_users_compile():
    """With this fixture, a test compiles its programs with full optimisation, as users do."""
    reduced = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()
    yield
    jax.config.update("jax_disable_most_optimizations", reduced)
    jax.clear_caches()


@pytest.fixture
def float32_products():
    """Computes matrix products in float32, also on accelerators; published numbers need this."""
    with jax.default_matmul_precision("highest"):
        yield


def pytest_unconfigure():
    shutil.rmtree(SCRATCH, ignore_errors=True)
