"""Songs whose repeats only memory can reach: composed, learnt, continued, written as MIDI, drawn.

    pip install -e '.[music]'
    python examples/music.py --workdir=runs/music

A song has the form AABA: a tune of 32 notes, the same tune again, another tune, and the first one
again. A note is a pitch of C major, short or long, so it is one id, and the notes of a tune are
drawn at random. Nothing but the first occurrence tells what a repeated note is, and it is 32 or 64
notes back. A segment has 16 notes, so a model without memory cannot see it.

The script composes songs as MIDI, reads them back as documents of ids, and trains `seeds` models
with memory and as many without it. It prints the loss of new and of repeated notes in nats, and
writes sample.mid, a song that the model generates, and its piano roll, sample.png, where a note is
blue if it equals the note that is 32 or 64 notes before it.
"""

import argparse
import json
import pathlib
from typing import Any

import jax
import numpy as np

import txl_jax

PITCHES = [48 + 12 * (n // 7) + (0, 2, 4, 5, 7, 9, 11)[n % 7] for n in range(15)]  # C3 to C5
BEAT = 0.5  # seconds from the start of a note to the start of the next one
TUNE, FORM = 32, "AABA"  # notes of a tune, and the tunes of a song
END = 0  # the id between songs; the id of a note is 1 + 2 * its degree + whether it is long
REPEATED = np.repeat([part in FORM[:n] for n, part in enumerate(FORM)], TUNE)
DISTANCES = (TUNE, 2 * TUNE)  # from a repeated note to the one that it repeats
SEGMENT, MEMORY = 16, 112


# --------------------------------------------------------------------------------------
# Songs, as ids and as MIDI.


def compose(rng: np.random.Generator) -> Any:
    """Returns a new song as a ``pretty_midi.PrettyMIDI``."""
    tunes = {}
    for part in sorted(set(FORM)):
        steps = rng.integers(-3, 4, TUNE)
        degrees = np.abs((rng.integers(15) + np.cumsum(steps)) % 28 - 14)  # reflected at both ends
        tunes[part] = 1 + 2 * degrees + rng.integers(2, size=TUNE)
    return to_midi(np.concatenate([tunes[part] for part in FORM]))


def to_midi(ids: np.ndarray) -> Any:
    """Returns the notes of ids [n] as a ``pretty_midi.PrettyMIDI``."""
    import pretty_midi

    piano = pretty_midi.Instrument(program=0)
    for n, i in enumerate(ids.tolist()):
        degree, is_long = divmod(i - 1, 2)
        end = BEAT * (n + (1.0 if is_long else 0.5))
        piano.notes.append(pretty_midi.Note(90, PITCHES[degree], BEAT * n, end))
    midi = pretty_midi.PrettyMIDI(initial_tempo=60 / BEAT)
    midi.instruments.append(piano)
    return midi


def to_ids(midi: Any) -> np.ndarray:
    """Returns the ids [n] of the notes of a ``pretty_midi.PrettyMIDI``."""
    notes = sorted(midi.instruments[0].notes, key=lambda note: note.start)
    is_long = [note.end - note.start > 0.75 * BEAT for note in notes]
    degrees = [PITCHES.index(note.pitch) for note in notes]
    return 1 + 2 * np.array(degrees) + np.array(is_long)


def write_songs(folder: pathlib.Path, counts: dict[str, int], seed: int = 0) -> None:
    """Writes songs of each split as ids that END separates, and the names of the ids."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    for split, count in counts.items():
        songs = [to_ids(compose(rng)) for _ in range(count)]
        separated = [part for song in songs for part in ([END], song)]
        np.save(folder / f"{split}.npy", np.concatenate([*separated, [END]]).astype(np.uint8))
    names = [f"{'CDEFGAB'[n % 7]}{3 + n // 7}" for n in range(len(PITCHES))]
    symbols = ["end", *(f"{name}{dot}" for name in names for dot in (".", ""))]  # C4. is short
    (folder / "symbols.json").write_text(json.dumps(symbols))


# --------------------------------------------------------------------------------------
# A model.


def settings(folder: pathlib.Path, mem_len: int, seeds: int, steps: int) -> dict[str, Any]:
    """Returns the settings of a run; ``mem_len`` is 0 in the control runs without memory."""
    reading = {"batch_size": 16, "seg_len": SEGMENT, "mem_len": mem_len}
    return {
        "name": "music",
        "data": {"name": "tokens", "path": str(folder), "document_separator": "end"},
        "model": {"n_layer": 2, "d_model": 64, "n_head": 4, "d_head": 16, "d_inner": 128},
        "optimizer": {"learning_rate": 3e-3, "warmup_steps": 50},
        "train": {
            **reading,
            "steps": steps,
            "num_seeds": seeds,
            "steps_per_dispatch": 10,
            "log_every": 100,
            "eval_every": 0,
        },
        "validate": reading,
        "evaluate": {**reading, "baselines": ("unigram", "bigram")},
        "generate": {"length": 0, "mem_len": MEMORY},
        "checkpoint": {"every": steps},
    }


def loss_of_notes(model: Any, songs: txl_jax.Pieces, mem_len: int) -> np.ndarray:
    """Returns the loss of each note in nats, [songs, notes of a song]."""
    nll = jax.jit(
        lambda segment, mems: model.model.apply(
            {"params": model.params},
            segment["inputs"],
            segment["targets"],
            mems,
            reset=segment["resets"],
            lengths=segment["lengths"],
            method="nll",
        )
    )
    mems, losses = model.model.init_mems(len(songs), mem_len), []
    for segment in txl_jax.segments(songs, len(songs), SEGMENT):  # a song in each row
        names = ("inputs", "targets", "resets", "lengths")
        found, mems = nll({name: getattr(segment, name) for name in names}, mems)
        losses.append(found)
    return np.concatenate(losses, axis=1)[:, : len(REPEATED)]


def train(workdir: pathlib.Path, mem_len: int, seeds: int = 3, steps: int = 1500) -> list[Any]:
    """Trains models on the songs in ``workdir/songs``, and returns one for each seed."""
    run = workdir / f"memory_{mem_len}"
    first = txl_jax.train(settings(workdir / "songs", mem_len, seeds, steps), run)
    return [first] if seeds == 1 else [txl_jax.load(str(run / f"seed_{n}")) for n in range(seeds)]


# --------------------------------------------------------------------------------------
# A generated song.


def repeats(ids: np.ndarray) -> np.ndarray:
    """Tells which notes of ids [n] equal the note one or two tunes before them, bool [n]."""
    found = np.zeros(len(ids), bool)
    for distance in DISTANCES:
        found[distance:] |= ids[distance:] == ids[:-distance]
    return found


def draw(ids: np.ndarray, path: pathlib.Path) -> None:
    """Draws a piano roll of ids [n], with another colour for repeats."""
    from matplotlib.figure import Figure

    again, figure = repeats(ids), Figure(figsize=(10, 3), layout="constrained")
    axes = figure.add_subplot()
    degrees, is_long = np.divmod(ids - 1, 2)
    pitches, widths = np.array(PITCHES)[degrees], np.where(is_long, 1.0, 0.5)
    for chosen, colour, label in ((~again, "0.6", "new"), (again, "tab:blue", "repeated")):
        at = np.flatnonzero(chosen)
        axes.barh(pitches[at], widths[at], left=at, height=0.9, color=colour, label=label)
    axes.set(xlabel="beat", ylabel="MIDI pitch", xticks=range(0, len(ids) + 1, TUNE))
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=120)


def main() -> None:
    """Composes songs, trains with and without memory, reports the losses, and samples."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workdir", required=True, type=pathlib.Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1500)
    flags = parser.parse_args()
    write_songs(flags.workdir / "songs", {"train": 2000, "valid": 100, "test": 100})
    songs = txl_jax.load_corpus("tokens", flags.workdir / "songs", document_separator="end").test
    report: dict[str, Any] = {}
    for mem_len in (MEMORY, 0):
        models = train(flags.workdir, mem_len, flags.seeds, flags.steps)
        losses = [loss_of_notes(model, songs, mem_len).mean(axis=0) for model in models]
        kinds = {"new": ~REPEATED, "repeated": REPEATED}
        report[f"memory {mem_len}"] = found = {
            kind: [round(float(loss[which].mean()), 4) for loss in losses]
            for kind, which in kinds.items()
        }
        print(f"memory {mem_len}, nats for each seed: {found}", flush=True)
        if mem_len:
            sample(models[0], flags.workdir)
    (flags.workdir / "losses.json").write_text(json.dumps(report, indent=1) + "\n")


def sample(model: Any, workdir: pathlib.Path) -> None:
    """Generates a song, and writes it as MIDI and as a picture."""
    generated = model.generate("end", length=len(REPEATED), temperature=0.7)[0]
    ids = np.array([i for i in generated.ids if i != END])
    path = workdir / "sample.mid"
    to_midi(ids).write(str(path))
    draw(to_ids(read_midi(path)), workdir / "sample.png")
    share = repeats(ids)[REPEATED[: len(ids)]].mean()
    print(
        f"sample.mid: {len(ids)} notes, {share:.0%} of those in the place of a repeat are repeats"
    )


def read_midi(path: pathlib.Path) -> Any:
    """Reads a MIDI file as a ``pretty_midi.PrettyMIDI``."""
    import pretty_midi

    return pretty_midi.PrettyMIDI(str(path))


if __name__ == "__main__":
    main()
