"""A model of your own text, a file or a folder of *.txt files: from scratch, or fine-tuned.

These commands train a model from scratch, score held-out text, and continue a prompt:

    python -m txl_jax.main --config=configs/my_text.py --workdir=runs/mine \\
        --config.data.path=FILE_OR_FOLDER
    python -m txl_jax.main --mode=evaluate --workdir=runs/mine
    python -m txl_jax.main --mode=generate --workdir=runs/mine --config.generate.prompt="It was"

The first command also ends with a score and a continuation; the other two repeat these steps, and
may change settings. The end of the text is held out, so cut off what does not belong to the text,
such as a book's licence.

A token is a character, unless one of these flags of the first command says otherwise:

    --config.data.vocab=byte      bytes: any text, also one that is not UTF-8
    --config.data.vocab=char      characters of the text (the default)
    --config.data.vocab=word      words between white space; for text that is split into words
                                  and has <unk> for rare ones, as benchmark texts have
    --config.data.vocab=subword   frequent pieces of words, learnt from the training part: any
                                  text; --config.data.vocab_size=8000 sets their number. Needs
                                  pip install '.[subword]'

Files of a folder that are named train, valid and test are the splits; any other text is cut into
these three. Compressed files, JSON lines, CSV, Parquet and Arrow are read too: docs/own_data.md.
The model is sized for a text of a few megabytes and some minutes on two CPU cores; for more, raise
train.steps and the model's sizes. The score depends on the text.

Measured on War and Peace by characters (one core of an Intel Xeon, other programs beside it, jax
0.10.2, 2026-11-24; one seed): 2.263 bits per character on the held-out end with memory 320. With
Adam, 5,000 updates of 8 x 64 tokens reached 2.356 in about the same time (the recipe's 1,500
updates take 114 ms each and Adam's 5,000 take 35 ms, medians on the idle machine).

A perplexity of subwords says little alone; the bits per byte that evaluation prints beside it
can be compared with those of bytes and characters on the same text.

Fine-tuning starts from a trained model: a workdir (also a converted one), or a folder that
`python -m txl_jax.convert RUN --to=safetensors FOLDER` wrote:

    python -m txl_jax.main --config=configs/my_text.py:fine_tune --workdir=runs/tuned \\
        --config.data.path=OTHER_TEXT --config.train.start_from=runs/mine
    python -m txl_jax.main --mode=evaluate --workdir=runs/tuned
    python -m txl_jax.main --mode=generate --workdir=runs/tuned --config.generate.prompt="It was"

The variant fine_tune sets neither the model's shape nor the kind of token: the starting model has
both, and the vocabulary. A word that the vocabulary lacks becomes <unk>. If there is no <unk>, or
if the text has an unknown character, the run stops before training and names the word or character.
Bytes and subwords can encode every text. Dropout, learning rate and lengths are those of the new
run; a model without memory needs --config.{train,validate,evaluate}.mem_len=0. To score the model
on the new text before fine-tuning, use `--mode=evaluate --workdir=runs/mine` with
--config.data.path=OTHER_TEXT.
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
        config.train.start_from = "WORKDIR_OF_THE_MODEL"  # must be given, else an error
        config.checkpoint.every = 100
    if variant == "smoke":
        config.train.update({"steps": 20, "log_every": 5, "eval_every": 0})
        config.optimizer.warmup_steps = 5
        config.validate.max_segments = config.evaluate.max_segments = 4
        config.generate.length = 32
    return config
