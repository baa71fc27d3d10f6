"""A model of your own text, a file or a folder of *.txt files: from nothing, or fine-tuned.

From nothing; then its score on held-out text; then text of its own:

    python -m txl_jax.main --config=configs/my_text.py --workdir=runs/mine \\
        --config.data.path=FILE_OR_FOLDER
    python -m txl_jax.main --mode=evaluate --workdir=runs/mine
    python -m txl_jax.main --mode=generate --workdir=runs/mine --config.generate.prompt="It was"

The first one ends with a score and a text too; the others do that again, with other settings.
What is held out is the end of the text: cut off what is not part of it, as a book's licence.

A token is a character; with one of these added to the first command it is something else:

    --config.data.vocab=byte      bytes: any text, also one that is not UTF-8
    --config.data.vocab=char      characters of the text (as it is)
    --config.data.vocab=word      words between white space; for text that is split into words
                                  and has <unk> for rare ones, as benchmarks have
    --config.data.vocab=subword   frequent pieces of words, learnt from the training part: any
                                  text; --config.data.vocab_size=8000 is how many. Needs
                                  pip install '.[subword]'

Files of a folder that are named train, valid and test are the splits; any other text is cut into
the three. Compressed files, JSON lines, CSV, Parquet and Arrow are read too: docs/own_data.md.
Sized for a text of a few megabytes and some minutes on two CPU cores; for more, raise train.steps
and the model's sizes. What it reaches depends on the text.

Measured on War and Peace by characters (one core of an Intel Xeon, other programs beside it, jax
0.10.2, 2026-11-24; one seed): 2.263 bits per character on the held-out end with memory 320. With
Adam, 5,000 updates of 8 x 64 tokens reached 2.356 in about the same time (1,500 programs of 114 ms
and 5,000 of 35 ms, medians on the idle machine).

A perplexity of subwords says little alone; the bits per byte that evaluation prints beside it
compare with those of bytes and characters on the same text.

Fine-tuned: training that starts from a trained model, a workdir of this project, converted ones
too, or a folder that `python -m txl_jax.convert RUN --to=safetensors FOLDER` wrote:

    python -m txl_jax.main --config=configs/my_text.py:fine_tune --workdir=runs/tuned \\
        --config.data.path=OTHER_TEXT --config.train.start_from=runs/mine
    python -m txl_jax.main --mode=evaluate --workdir=runs/tuned
    python -m txl_jax.main --mode=generate --workdir=runs/tuned --config.generate.prompt="It was"

This variant leaves the model's shape and the kind of token out: they are those of the starting
model, and so is its vocabulary. Words that it lacks become its <unk>; where it has none, and for
characters that it lacks, the run stops before it begins and says which. Bytes and subwords lack
nothing. Dropout, rates and lengths are the new run's; a model without memory needs
--config.{train,validate,evaluate}.mem_len=0. `--mode=evaluate --workdir=runs/mine` with
--config.data.path=OTHER_TEXT tells what the model is worth on the new text before.
"""

from ml_collections import ConfigDict

VARIANTS = ("fine_tune", "smoke")


def get_config(variant=""):
    config = ConfigDict(
        {
            "name": "my_text",
            "model": {
                "dtype": "auto",
                "n_layer": 3,
                "d_model": 128,
                "n_head": 2,
                "d_head": 64,
                "d_inner": 512,
                "dropout": 0.1,
                "pre_lnorm": True,
            },
            "data": {"name": "text", "vocab": "char"},
            "optimizer": {
                "name": "muon",
                "learning_rate": 8e-3,
                "embedding_ratio": 0.3,
                "warmup_steps": 100,
                "clip_norm": 0.0,
            },
            "train": {
                "steps": 1500,
                "batch_size": 16,
                "seg_len": 128,
                "mem_len": 128,
                "log_every": 50,
                "eval_every": 500,
            },
            "validate": {"batch_size": 8, "seg_len": 128, "mem_len": 192, "max_segments": 40},
            "evaluate": {
                "batch_size": 8,
                "seg_len": 128,
                "mem_len": 320,
                "baselines": ("unigram", "bigram"),
            },
            "generate": {"length": 500, "mem_len": 320, "temperature": 0.8},
            "checkpoint": {"every": 500},
        }
    )
    if variant == "fine_tune":
        config.name = "my_text_fine_tune"
        config.model = {"dropout": 0.1}
        config.data = {"name": "text"}
        config.optimizer = {"learning_rate": 5e-4, "warmup_steps": 100}
        config.train.update({"steps": 500, "batch_size": 8, "eval_every": 100})
        config.train.start_from = "WORKDIR_OF_THE_MODEL"  # to be given; without it, an error
        config.checkpoint.every = 100
    if variant == "smoke":
        config.train.update({"steps": 20, "log_every": 5, "eval_every": 0})
        config.optimizer.warmup_steps = 5
        config.validate.max_segments = config.evaluate.max_segments = 4
        config.generate.length = 32
    return config
