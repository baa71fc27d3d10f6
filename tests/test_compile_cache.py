"""Compiled programs are kept where the user said, or beside the prepared corpora."""

import jax
import pytest

from txl_jax.compile_cache import keep_compiled_programs


@pytest.fixture
def unset():
    """JAX as without any setting; put back afterwards."""
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", before)


def test_they_are_kept_in_the_data_folder(unset, tmp_path, monkeypatch):
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
    assert not (tmp_path / ".cache").exists()  # JAX makes it when there is something to keep


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
