"""A model split into small files and joined again is the same, up to bfloat16 rounding."""

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import arrays, run_in_workdir

import txl_jax
from benchmarks.pieces import main


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    run_in_workdir(folder, folder / "run", **{"average.swa_start": 11, "average.use": "swa"})
    return folder / "run"


@pytest.mark.slow
def test_pieces_are_small_and_together_the_weights_that_were_chosen(workdir, tmp_path, capsys):
    main(["split", str(workdir), str(tmp_path / "pieces"), "--mib=0.002"])
    sizes = [path.stat().st_size for path in (tmp_path / "pieces").glob("*.safetensors")]
    assert len(sizes) > 3
    assert max(sizes) < 2 * 0.002 * 2**20  # each file also has a header of names and shapes
    main(["join", str(tmp_path / "pieces"), str(tmp_path / "exported")])
    assert "step 12, swa weights" in capsys.readouterr().out
    want = arrays(txl_jax.load(str(workdir), "12", "swa").params)
    got = arrays(txl_jax.load(str(tmp_path / "exported")).params)
    assert got.keys() == want.keys()
    for key, value in want.items():
        rounded = value.astype(jnp.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(got[key], rounded, err_msg=key)


@pytest.mark.integration
def test_a_piece_that_is_missing_is_told(workdir, tmp_path):
    main(["split", str(workdir), str(tmp_path / "pieces"), "--mib=0.002"])
    next((tmp_path / "pieces").glob("piece_01*")).unlink()
    with pytest.raises(SystemExit, match=r"has \d+ of \d+ pieces"):
        main(["join", str(tmp_path / "pieces"), str(tmp_path / "exported")])
