"""A damaged checkpoint is detected, and the checkpoint before it is restored instead.

A checkpoint of another config is refused.
"""

import json
import os
import pathlib
import threading

import numpy as np
import pytest
from saved_states import at_step, fresh, restore
from tiers import rest_slow
from tiny_runs import arrays, corpus_and_experiment, run

from txl_jax import literal_path
from txl_jax.checkpoint import checkpoints as checkpoints_module
from txl_jax.checkpoint import orbax_items
from txl_jax.checkpoint.checkpoint_folder import CheckpointFolder
from txl_jax.checkpoint.checkpoints import Checkpoints
from txl_jax.checkpoint.errors import CheckpointError, WorkdirError
from txl_jax.checkpoint.workdir_files import check_path, check_writable


@pytest.fixture
def folder(tmp_path):
    return tmp_path


def save_some(folder, steps=(1, 2, 3), losses=None, **changes):
    """Saves a checkpoint at each of ``steps`` in ``folder/run``.

    ``losses`` has validation losses by step, and ``changes`` are settings. Returns the experiment,
    the first training state, the shapes of its arrays, and the folder of the checkpoints.
    """
    exp, state, abstract = fresh(folder, **changes)
    with Checkpoints(str(folder / "run"), exp.checkpoint) as checkpoints:
        for step in steps:
            loss = (losses or {}).get(step)
            meta = {"config": exp.to_dict(), "window": {"n": step}, "evaluated": True}
            checkpoints.save(step, at_step(state, step), meta, loss)
    return exp, state, abstract, folder / "run" / "checkpoints"


def largest_file(folder):
    files = [p for p in pathlib.Path(folder).rglob("*") if p.is_file()]
    return max(files, key=lambda p: p.stat().st_size)


def damage(kind, step_folder):
    if kind == "one flipped byte":
        path = largest_file(step_folder)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif kind == "truncated":
        path = largest_file(step_folder)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif kind == "missing file":
        largest_file(step_folder).unlink()
    elif kind == "missing metadata":
        (step_folder / "params" / "_METADATA").unlink()
    elif kind in MANIFESTS:
        (step_folder / "checksums.json").write_bytes(MANIFESTS[kind])
    elif kind == "deleted checksums":
        (step_folder / "checksums.json").unlink()
    elif kind == "no meta":
        for path in sorted((step_folder / "meta").rglob("*"), reverse=True):
            path.unlink()
        (step_folder / "meta").rmdir()


MANIFESTS = {
    "damaged checksums": b"{",
    "checksums of nothing": b"{}",
    "checksums that is a list": b'["params/_METADATA"]',
    "checksums that is a number": b"7",
    "checksums that is null": b"null",
    "checksums that is not UTF-8": b"\xff",
}


def test_what_is_restored_is_what_was_saved(folder):
    exp, state, abstract, _ = save_some(folder)
    got, meta = restore(folder, exp, abstract)
    assert meta["window"] == {"n": 3}
    want = arrays(at_step(state, 3))
    for key, value in arrays(got).items():
        np.testing.assert_array_equal(value, want[key], err_msg=key)


NAMES = ["a[1]", 'a"#\n', "exp [v2]", "a*", "a?", "[!a]", "%20", "日本"]


@pytest.mark.parametrize("name", rest_slow(2, NAMES))
def test_a_checkpoint_is_restored_whatever_the_name_of_its_folder(folder, name):
    """Orbax reads a path as a glob pattern: for the folder ``a[1]``, it would find ``a1``."""
    for each in ("a1", "ab", name):
        (folder / each).mkdir()
    for sibling in ("a1", "ab"):
        save_some(folder / sibling, (1,))
    exp, state, abstract, _ = save_some(folder / name, (1, 2))
    found, _ = restore(folder / name, exp, abstract)
    for one, other in zip(arrays(found), arrays(at_step(state, 2)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["a\\b", os.fsdecode(b"caf\xe9")])
def test_a_folder_that_cannot_hold_checkpoints_is_refused_before_work(folder, name):
    for use in (check_writable, check_path, lambda path: Checkpoints(path).restore_params(1, {})):
        with pytest.raises((WorkdirError, CheckpointError)):
            use(os.path.join(folder, name, "run"))
    assert not os.listdir(folder)


def test_a_save_that_leaves_no_checkpoint_and_no_error_is_an_error(folder, monkeypatch):
    monkeypatch.setattr(orbax_items.Manager, "save", lambda *args, **kwargs: True)
    exp, state, _ = fresh(folder)
    with Checkpoints(str(folder / "run"), exp.checkpoint) as checkpoints:
        checkpoints.save(1, at_step(state, 1), {"config": exp.to_dict()}, None)
        with pytest.raises(CheckpointError, match="files of step 1 are missing after the save"):
            checkpoints.wait()


def test_a_save_whose_arrays_cannot_be_listed_is_not_committed(folder, monkeypatch):
    monkeypatch.setattr(literal_path.LiteralPath, "glob", lambda *args: iter(()))
    exp, state, _ = fresh(folder)
    with Checkpoints(str(folder / "run"), exp.checkpoint) as checkpoints:
        checkpoints.save(1, at_step(state, 1), {"config": exp.to_dict()}, None)
        with pytest.raises(CheckpointError, match="has 0 arrays on disk instead of"):
            checkpoints.wait()
        assert checkpoints.steps() == []


def test_a_state_without_memory_is_restored(folder):
    exp, _, abstract, _ = save_some(folder, **{"train.mem_len": 0})
    got, _ = restore(folder, exp, abstract)
    assert got.mems.hidden.shape[2] == 0


@pytest.mark.parametrize(
    "kind",
    [
        "one flipped byte",
        "truncated",
        "missing file",
        "missing metadata",
        "deleted checksums",
        "no meta",
        *rest_slow(2, MANIFESTS),
    ],
)
def test_damage_falls_back_to_the_checkpoint_before_it_and_loses_nothing(folder, kind, capsys):
    exp, _, abstract, checkpoints = save_some(folder)
    damage(kind, checkpoints / "3")
    got, _ = restore(folder, exp, abstract)
    assert int(got.step) == 2
    out = capsys.readouterr().out
    assert out.startswith("checkpoint 3 ")
    renamed = "it was renamed to checkpoints/damaged-3, and the checkpoint before it is tried"
    assert renamed in out
    assert (checkpoints / "damaged-3").is_dir()


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_again(folder):
    """If the run began again from step 0, it would discard its records."""
    exp, _, abstract, checkpoints = save_some(folder)
    for step in ("2", "3"):
        damage("truncated", checkpoints / step)
    for _ in range(2):
        with pytest.raises(
            CheckpointError, match=r"no checkpoint in .* intact, .*repair damaged-3"
        ):
            restore(folder, exp, abstract)
    assert sorted(os.listdir(checkpoints)) == ["damaged-2", "damaged-3"]


def test_an_empty_folder_is_no_checkpoint(folder):
    exp, _, abstract, checkpoints = save_some(folder)
    (checkpoints / "9").mkdir()
    assert int(restore(folder, exp, abstract)[0].step) == 3


def test_an_interrupt_while_a_save_is_awaited_leaves_the_save_alone(folder, monkeypatch):
    exp, state, _ = fresh(folder)
    interrupted = threading.Event()
    write = checkpoints_module.write_manifest

    def late(*args):
        assert interrupted.wait(60)
        write(*args)

    monkeypatch.setattr(checkpoints_module, "write_manifest", late)
    with Checkpoints(str(folder / "run"), exp.checkpoint) as checkpoints:
        meta = {"config": exp.to_dict(), "window": {"n": 1}, "evaluated": True}
        checkpoints.save(1, at_step(state, 1), meta, None)
        with monkeypatch.context() as patch:
            patch.setattr(checkpoints._manager, "wait_until_finished", interrupt)
            with pytest.raises(KeyboardInterrupt):
                checkpoints.wait()
        interrupted.set()
        checkpoints.wait()
        assert list(checkpoints.steps()) == [1]


def interrupt():
    raise KeyboardInterrupt


def test_an_interrupted_save_is_no_checkpoint_and_the_step_can_be_saved_again(folder):
    exp, state, abstract, checkpoints = save_some(folder)
    (checkpoints / "3").rename(checkpoints / "3.orbax-checkpoint-tmp")
    assert int(restore(folder, exp, abstract)[0].step) == 2
    assert sorted(os.listdir(checkpoints)) == ["2"]  # the half-written checkpoint 3 is deleted
    with Checkpoints(str(folder / "run"), exp.checkpoint) as again:
        again.save(3, at_step(state, 3), {"config": exp.to_dict()}, None)
    assert int(restore(folder, exp, abstract)[0].step) == 3


def test_reading_leaves_a_save_that_is_under_way_alone(folder):
    _, _, _, checkpoints = save_some(folder)
    (checkpoints / "4.orbax-checkpoint-tmp").mkdir()
    with Checkpoints(str(folder / "run")) as reader:
        assert reader.choose("latest") == 3
    assert (checkpoints / "4.orbax-checkpoint-tmp").is_dir()


def test_a_step_can_be_saved_again_after_its_checkpoint_was_damaged(folder):
    exp, state, abstract, checkpoints = save_some(folder)
    damage("truncated", checkpoints / "3")
    with Checkpoints(str(folder / "run"), exp.checkpoint) as again:
        again.restore(abstract, exp.to_dict())
        again.save(3, at_step(state, 3), {"config": exp.to_dict()}, None)
    assert int(restore(folder, exp, abstract)[0].step) == 3


def test_saving_a_step_twice_is_an_error_not_a_silent_skip(folder):
    exp, state, _, _ = save_some(folder)
    with (
        Checkpoints(str(folder / "run"), exp.checkpoint) as again,
        pytest.raises(CheckpointError, match="there is a checkpoint of the same or a later step"),
    ):
        again.save(3, at_step(state, 3), {"config": exp.to_dict()}, None)


def test_replacing_keeps_the_old_until_the_new_is_whole(folder):
    exp, state, abstract, checkpoints = save_some(folder)
    with Checkpoints(str(folder / "run"), exp.checkpoint) as again:
        meta = {"config": exp.to_dict(), "window": {"n": 33}}
        again.replace(3, at_step(state, 33), meta, 1.0)
    assert restore(folder, exp, abstract)[1]["window"] == {"n": 33}
    (checkpoints / "3").rename(checkpoints / "replaced-3")  # as if killed during replace()
    assert restore(folder, exp, abstract)[1]["window"] == {"n": 33}


def test_the_newest_and_the_best_are_kept(folder):
    losses = {1: 3.0, 2: 1.0, 4: 2.0}
    exp, _, _, checkpoints = save_some(folder, steps=(1, 2, 3, 4, 5, 6), losses=losses)
    kept = sorted(int(n) for n in os.listdir(checkpoints) if n.isdigit())
    assert kept == [2, 5, 6]
    with Checkpoints(str(folder / "run"), exp.checkpoint) as reopened:
        assert reopened.choose("best") == 2
        assert reopened.choose("latest") == 6
        assert CheckpointFolder(str(folder / "run")).valid_loss(2) == 1.0
        with pytest.raises(CheckpointError, match=r"there is no checkpoint 4 in .*, only 2, 5, 6"):
            reopened.choose("4")


def test_every_checkpoint_has_a_checksum_of_each_file_when_it_is_committed(folder, monkeypatch):
    rename, committed = os.rename, []

    def commit(source, target, **more):
        if os.fspath(source).endswith(".orbax-checkpoint-tmp"):
            committed.append(os.path.exists(os.path.join(source, "checksums.json")))
        rename(source, target, **more)

    monkeypatch.setattr(os, "rename", commit)
    _, _, _, checkpoints = save_some(folder)
    assert any(committed)
    for step in (2, 3):
        manifest = json.loads((checkpoints / str(step) / "checksums.json").read_text())
        files = {
            str(p.relative_to(checkpoints / str(step)))
            for p in (checkpoints / str(step)).rglob("*")
            if p.is_file()
        }
        at_commit = {"checksums.json", "_CHECKPOINT_METADATA", "commit_success.txt"}
        assert set(manifest) == files - at_commit


def test_a_checkpoint_is_restored_without_the_files_that_have_no_checksum(folder):
    exp, _, abstract, checkpoints = save_some(folder)
    (checkpoints / "3" / "_CHECKPOINT_METADATA").write_bytes(b"\xff{")
    (checkpoints / "3" / "commit_success.txt").unlink()
    assert int(restore(folder, exp, abstract)[0].step) == 3


def test_evaluation_refuses_a_checkpoint_without_checksums(folder):
    _, _, abstract, checkpoints = save_some(folder)
    (checkpoints / "3" / "checksums.json").unlink()
    with (
        Checkpoints(str(folder / "run")) as reader,
        pytest.raises(CheckpointError, match=r"checkpoint 3 in .* has no checksums\.json"),
    ):
        reader.restore_params(3, abstract.params)


def test_a_checkpoint_of_another_config_is_refused_with_the_keys_that_differ(folder):
    _, _, _, _ = save_some(folder)
    exp, _, abstract = fresh(folder, **{"model.n_layer": 1, "seed": 5})
    with pytest.raises(CheckpointError) as caught:
        restore(folder, exp, abstract)
    assert str(caught.value) == (
        "checkpoint 3 has another config: model.n_layer: 2 -> 1; seed: 0 -> 5. Use another"
        " workdir, or the checkpoint's values"
    )


def test_settings_that_do_not_touch_the_state_may_change(folder):
    save_some(folder)
    exp, _, abstract = fresh(folder, **{"evaluate.mem_len": 7, "train.log_every": 2})
    assert int(restore(folder, exp, abstract)[0].step) == 3


@pytest.mark.parametrize("version", [1, 3])
def test_a_checkpoint_of_another_format_is_refused_and_stays(folder, monkeypatch, version):
    with monkeypatch.context() as patch:
        patch.setattr("txl_jax.checkpoint.checkpoints.FORMAT", version)
        exp, _, abstract, checkpoints = save_some(folder)
    refused = f"has format {version}, and this version of txl_jax reads format 2 only"
    with pytest.raises(CheckpointError, match=refused) as caught:
        restore(folder, exp, abstract)
    assert "\n" not in str(caught.value)
    with Checkpoints(str(folder / "run")) as reader, pytest.raises(CheckpointError, match=refused):
        reader.restore_params(3, abstract.params)
    assert {"2", "3"} <= set(os.listdir(checkpoints))


def test_opening_removes_the_files_of_the_program_only(folder):
    exp, _, _, checkpoints = save_some(folder)
    mine = (
        "replaced-notes",
        "replaced-",
        "notes.orbax-checkpoint-tmp",
        "4.orbax-checkpoint-tmp.gz",
    )
    ours = ("4.orbax-checkpoint-tmp", "replaced-3")
    for name in (*mine, *ours):
        (checkpoints / name).mkdir()
    with Checkpoints(str(folder / "run"), exp.checkpoint):
        assert set(os.listdir(checkpoints)) == {"2", "3", *mine}


@pytest.mark.integration
def test_training_leaves_a_model_that_load_gives_back(folder):
    from txl_jax.checkpoint.loading import load_workdir as load
    from txl_jax.checkpoint.workdir import init_workdir

    corpus, exp = corpus_and_experiment(folder)
    claim_dir = folder / "run"
    claim_dir.mkdir()
    init_workdir(str(claim_dir), exp, corpus)
    outcome = run(folder, claim_dir)
    trained = load(str(claim_dir), "latest")
    assert outcome.finished
    assert trained.step == exp.train.steps
    assert trained.vocab.symbols == corpus.vocab.symbols
    want = arrays(outcome.state.params)
    for key, value in arrays(trained.params).items():
        np.testing.assert_array_equal(value, want[key], err_msg=key)
