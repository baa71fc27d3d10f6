"""If the devices of several processes cannot share a batch's rows equally, devices repeat work.

The results do not change. The mesh axis ``copies`` numbers groups of devices. Each group does the
same work.
"""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from many_processes import ran
from mesh_runs import assert_close, batches, experiment, gradient, of_output, training
from run_records import assert_near, assert_near_state, final_state, records
from tiers import rest_slow
from tiny_runs import run, write_config

from txl_jax.config import ConfigError, MeshConfig, TransformerXLConfig, override
from txl_jax.data.on_device import check_single_process
from txl_jax.parallel import mesh as meshes
from txl_jax.parallel.mesh import copies, idle_devices, make_mesh, scoring_mesh
from txl_jax.parallel.shardings import equal_on_copies
from txl_jax.planning.run_programs import run_programs

SMALL = TransformerXLConfig(n_layer=1)  # its parameters are not sharded


class OfProcess:
    """A stand-in for a device of a process, with the attributes that the checks of a mesh read."""

    def __init__(self, process, platform):
        self.process_index, self.platform = process, platform


def of_processes(n, each, platform="tpu") -> Any:
    return [OfProcess(i // each, platform) for i in range(n * each)]


@pytest.fixture
def noted(monkeypatch):
    """Makes ``jax.make_mesh`` return only the sizes of the axes and the number of devices."""
    note = lambda shape, names, *_, devices: (dict(zip(names, shape, strict=True)), len(devices))
    monkeypatch.setattr(jax, "make_mesh", note)


@pytest.mark.parametrize("platform", ["tpu", "gpu", "cpu"])
@pytest.mark.parametrize(
    ("settings", "batch", "parts", "sizes"),
    [
        ({}, 22, 1, (4, 2, 1, 1)),
        ({}, 10, 1, (4, 2, 1, 1)),
        ({}, 60, 1, (2, 4, 1, 1)),
        ({}, 60, 5, (2, 4, 1, 1)),
        ({}, 7, 1, (8, 1, 1, 1)),
        ({}, 1, 1, (8, 1, 1, 1)),
        ({"fsdp": 2}, 22, 1, (4, 1, 2, 1)),
        ({"tensor": 2}, 22, 1, (2, 2, 1, 2)),
        ({"data": 2}, 22, 1, (4, 2, 1, 1)),
        ({}, 64, 1, (8, 1, 1)),
        ({"tensor": 4}, 22, 1, (2, 1, 4)),
    ],
)
def test_all_devices_of_several_processes_take_part(settings, batch, parts, sizes, platform, noted):
    """Two processes have four devices each. Without repeated work the mesh has no ``copies``."""
    c, cfg, devices = MeshConfig(**settings), SMALL, of_processes(2, 4, platform)
    names = ("copies", "data", "fsdp", "tensor")[-len(sizes) :]
    made = make_mesh(c, cfg, batch, parts, devices)
    assert made == (dict(zip(names, sizes, strict=True)), 8)


def test_gpus_of_several_hosts_may_share_matrices_over_hosts(noted):
    """XLA gives the GPUs of each host a ``slice_index`` of their own, as it does for TPU slices."""
    devices = of_processes(2, 8, "gpu")
    for device in devices:
        device.slice_index = device.process_index
    made = make_mesh(MeshConfig(fsdp=16), SMALL, 16, devices=devices)
    assert made == ({"data": 1, "fsdp": 16, "tensor": 1}, 16)


def test_a_text_on_the_device_needs_one_process():
    check_single_process(of_processes(1, 8))
    with pytest.raises(ConfigError, match=r"train.text_on_device: needs a single process"):
        check_single_process(of_processes(2, 4))
    exp, two = experiment(**{"train.text_on_device": True}), of_processes(2, 1)
    with pytest.raises(ConfigError, match=r"train.text_on_device: needs a single process"):
        next(run_programs(override(exp, {"mesh.data": 1}), two))


def test_any_batch_fits_any_number_of_processes(noted):
    for n, each, batch in ((2, 4, 22), (3, 8, 22), (4, 4, 60), (6, 1, 10), (16, 4, 22), (5, 3, 32)):
        devices = of_processes(n, each)
        made: Any = make_mesh(MeshConfig(), SMALL, batch, devices=devices)
        assert np.prod(list(made[0].values())) == made[1] == n * each
        assert batch % made[0]["data"] == 0
        scored: Any = scoring_mesh(MeshConfig(), SMALL, batch, devices)
        assert scored == ({"data": n * each, "fsdp": 1, "tensor": 1}, n * each)


@pytest.mark.parametrize(
    ("mesh", "batch", "fix"),
    [
        ({"data": 3}, 6, "mesh.data 2 works"),
        ({"data": 3}, 60, "mesh.data 4 works"),
        ({"data": 1, "fsdp": 3}, 6, "fsdp x tensor = 3 must divide 4"),
        ({"fsdp": 3}, 6, "fsdp x tensor = 3 must divide 4"),
    ],
)
def test_a_mesh_that_does_not_divide_the_devices_of_processes_is_refused(mesh, batch, fix):
    with pytest.raises(ConfigError, match=r"of 4 devices, and with several processes") as caught:
        make_mesh(MeshConfig(**mesh), SMALL, batch, devices=of_processes(2, 2))
    assert str(caught.value).endswith(fix)


@pytest.mark.parametrize(
    ("settings", "batch", "words"),
    [
        ({}, 22, "2 of 8 devices are in use, and the others repeat the same work; train.batch_size"
         " = 16 or 24 uses all"),
        ({"data": 2}, 64, "2 of 8 devices are in use, and the others repeat the same work;"
         " mesh.data = -1 uses as many as the rows allow"),
        ({}, 64, None),
    ],
)  # fmt: skip
def test_repeated_work_is_reported_with_the_nearest_batch_sizes(
    settings, batch, words, monkeypatch
):
    monkeypatch.setattr(meshes, "_many_processes", lambda devices: True)
    c = MeshConfig(**settings)
    told = idle_devices(make_mesh(c, SMALL, batch), c, batch)
    assert (told is None) == (words is None)
    assert (words or "") in (told or "")


def test_copies_that_rounding_drove_apart_are_made_equal(monkeypatch):
    monkeypatch.setattr(meshes, "_many_processes", lambda devices: True)
    mesh = make_mesh(MeshConfig(fsdp=2), SMALL, 6)
    assert copies(mesh) == 4
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    copy_of = {mesh.devices[i]: i[0] for i in np.ndindex(mesh.devices.shape)}
    parts = [jax.device_put(np.full(3, copy_of[d], np.float32), d) for d in mesh.devices.flat]
    x = jax.make_array_from_single_device_arrays((6,), sharding, parts)
    made = jax.jit(functools.partial(equal_on_copies, mesh=mesh))({"a": x})["a"]
    assert made.sharding.is_equivalent_to(sharding, 1)
    for shard in made.addressable_shards:
        np.testing.assert_array_equal(shard.data, np.full(3, 1.5))


@pytest.mark.integration
@pytest.mark.parametrize(
    ("mesh", "output"),
    rest_slow(0, [((2, 1, 1), "sampled"), ((1, 2, 1), "gtrxl"), ((1, 1, 2), "gtrxl")]),
)
def test_gradients_and_losses_with_copies_are_those_of_one_device(mesh, output, monkeypatch):
    one = experiment(**of_output(output))
    want = gradient(one), training(one)[0]
    monkeypatch.setattr(meshes, "_many_processes", lambda devices: True)
    exp = experiment(mesh, **of_output(output))
    assert copies(make_mesh(exp.mesh, exp.model, len(batches()[0].reset))) == 4
    assert_close(gradient(exp), want[0], 1e-5)
    np.testing.assert_allclose(training(exp)[0], want[1], rtol=1e-4)


@pytest.mark.slow
def test_two_processes_whose_devices_do_not_divide_the_rows_train_as_one(tmp_path):
    """Two of the eight devices share the six rows, and three other pairs repeat their work."""
    changes: Any = {
        "model.n_layer": 1,
        "model.dropout": 0.1,
        "train.batch_size": 6,
        "validate.batch_size": 3,
        "checkpoint.keep_last": 9,
        "mesh.data": -1,
    }
    config = write_config(tmp_path, **changes)
    run(tmp_path, tmp_path / "one", **{**changes, "mesh.data": 1})
    arguments = (f"--config={config}", f"--workdir={tmp_path / 'two'}")
    first, _ = ran(tmp_path / "said", 2, *arguments, devices=4)
    assert "2 of 8 devices are in use, and the others repeat the same work" in first
    assert_near(records(tmp_path / "one"), records(tmp_path / "two"))
    states = (final_state(tmp_path, tmp_path / name, **changes) for name in ("one", "two"))
    assert_near_state(*states)
