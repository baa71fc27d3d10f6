"""Compiled programs are stored in the folder that the user named, or beside prepared corpora."""

import os
import subprocess
import sys

import jax
import pytest

from txl_jax.parallel import compile_cache
from txl_jax.parallel.compile_cache import keep_compiled_programs, remove_longest_unused


@pytest.fixture
def unset():
    """Removes JAX's setting of a cache folder, and restores it afterwards."""
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", before)


def test_programs_are_kept_in_the_data_folder(unset, tmp_path, monkeypatch):
    monkeypatch.setenv("TXL_DATA_DIR", str(tmp_path / "data"))
    keep_compiled_programs()
    assert jax.config.values["jax_compilation_cache_dir"].startswith(
        f"{tmp_path / 'data' / 'compiled'}/"
    )


def test_without_one_in_the_users_cache(unset, tmp_path, monkeypatch):
    monkeypatch.delenv("TXL_DATA_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    keep_compiled_programs()
    kept = jax.config.values["jax_compilation_cache_dir"]
    assert kept.startswith(f"{tmp_path}/.cache/txl_jax/compiled/")
    assert not (tmp_path / ".cache").exists()  # JAX makes the folder when it stores a program


def test_a_folder_that_was_named_stays(unset):
    jax.config.update("jax_compilation_cache_dir", "/somewhere")
    keep_compiled_programs()
    assert jax.config.values["jax_compilation_cache_dir"] == "/somewhere"


def test_other_processors_have_a_folder_of_their_own(unset, tmp_path, monkeypatch):
    monkeypatch.setenv("TXL_DATA_DIR", str(tmp_path))
    kept: list[str] = []
    for flags in ("fpu avx2", "fpu avx2 avx512f", "fpu avx2"):
        text = f"processor : 0\ncpu MHz : {len(kept)}\nflags\t\t: {flags}\n"
        monkeypatch.setattr("pathlib.Path.read_text", lambda *_, text=text, **__: text)
        jax.config.update("jax_compilation_cache_dir", None)
        keep_compiled_programs()
        kept.append(jax.config.values["jax_compilation_cache_dir"])
    assert kept[0] == kept[2] != kept[1]


# --------------------------------------------------------------------------------------
# The limit on the bytes of the cache.


def programs(folder, **sizes):
    """Writes files named like JAX's stored programs, each dated a day after the previous one."""
    folder.mkdir(parents=True, exist_ok=True)
    for day, (name, size) in enumerate(sizes.items()):
        (folder / f"{name}-cache").write_bytes(b"x" * size)
        os.utime(folder / f"{name}-cache", (day * 86400, day * 86400))


def there(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_longest_unused_go_until_the_rest_is_within_the_limit(tmp_path):
    programs(tmp_path, a=30, b=30, c=30, d=30)
    (tmp_path / "notes").write_bytes(b"x" * 500)  # not a program
    os.utime(tmp_path / "a-cache", (9 * 86400, 0))  # a-cache was read last
    remove_longest_unused(tmp_path, 90)
    assert there(tmp_path) == ["a-cache", "c-cache", "d-cache", "notes"]
    remove_longest_unused(tmp_path, 89)
    assert there(tmp_path) == ["a-cache", "d-cache", "notes"]


def test_a_program_above_the_limit_is_removed_with_those_used_before_it(tmp_path):
    programs(tmp_path, a=10, large=200, b=10)
    remove_longest_unused(tmp_path, 100)
    assert there(tmp_path) == ["b-cache"]


def test_what_cannot_be_removed_or_is_not_there_costs_nothing(tmp_path, monkeypatch):
    remove_longest_unused(tmp_path / "never", 0)
    programs(tmp_path, a=30, b=30)

    def refused(path, **_):
        raise PermissionError(path)

    monkeypatch.setattr("pathlib.Path.unlink", refused)
    remove_longest_unused(tmp_path, 0)
    assert there(tmp_path) == ["a-cache", "b-cache"]


def test_only_our_own_folder_is_limited_and_only_where_jax_does_not(unset, tmp_path, monkeypatch):
    monkeypatch.setenv("TXL_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(compile_cache, "LIMIT", 30)
    folder = compile_cache._folder()
    programs(folder, a=30, b=30)
    programs(tmp_path / "named", a=30, b=30)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "named"))
    keep_compiled_programs()
    assert there(tmp_path / "named") == there(folder) == ["a-cache", "b-cache"]
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_compilation_cache_max_size", 100)
    try:
        keep_compiled_programs()
    finally:
        jax.config.update("jax_compilation_cache_max_size", -1)
    assert there(folder) == ["a-cache", "b-cache"]
    jax.config.update("jax_compilation_cache_dir", None)
    keep_compiled_programs()
    assert there(folder) == ["b-cache"]


COMPILES = """
import jax
from txl_jax.parallel import compile_cache

compile_cache.LIMIT = 10_000_000
compile_cache.keep_compiled_programs()
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.jit(lambda x: x * 2 + 1)(jax.numpy.ones(3)).block_until_ready()
"""


def test_what_jax_itself_has_kept_is_found_by_its_name(tmp_path):
    environment = {**os.environ, "TXL_DATA_DIR": str(tmp_path)}
    del environment["JAX_COMPILATION_CACHE_DIR"]
    subprocess.run([sys.executable, "-c", COMPILES], env=environment, check=True, timeout=120)
    (folder,) = (tmp_path / "compiled").iterdir()
    assert any(folder.iterdir())
    remove_longest_unused(folder, 0)
    assert there(folder) == []
