"""A model of your own text, a file or a folder of *.txt files: from scratch, or fine-tuned.

These commands train a model from scratch, score held-out text, and continue a prompt:

    python -m txl_jax.main --config=configs/my_text.py --workdir=runs/mine \\
        --config.data.path=FILE_OR_FOLDER
    python -m txl_jax.main --mode=evaluate --workdir=runs/mine
    python -m txl_jax.main --mode=generate --workdir=runs/mine --config.generate.prompt="It was"

The first command also scores and generates at its end. The other two commands repeat these two
steps, for example with other settings. The end of the text is held out for scoring, so first remove
what does not belong to the text, such as the licence at the end of a book.

A token is a character, unless one of these flags of the first command says otherwise:

    --config.data.vocab=byte      bytes: works for any text, even if it is not UTF-8
    --config.data.vocab=char      characters of the text (the default)
    --config.data.vocab=word      words between white space; for text that is already split into
                                  words, with <unk> for rare words, like benchmark texts
    --config.data.vocab=subword   frequent pieces of words, learnt from the training split; works
                                  for any text. --config.data.vocab_size=8000 sets the number of
                                  pieces. Needs pip install '.[subword]'

If a folder has files named train, valid and test, these are the splits; any other text is cut into
three splits. Compressed files, JSON lines, CSV, Parquet and Arrow are read too: docs/own_data.md.
The model suits a text of a few megabytes and some minutes of training on two CPU cores. For a
longer text or more time, raise train.steps and the model's sizes. The score depends on the text.

Measured on the characters of War and Peace (one core of an Intel Xeon while other programs ran, jax
0.10.2, 2026-11-24; one seed): 2.263 bits per character on the held-out end with memory 320. With
Adam, 5,000 updates of 8 x 64 tokens reached 2.356 in about the same time. On the idle machine, one
of the recipe's 1,500 updates takes 114 ms, and one of Adam's 5,000 takes 35 ms (medians).

The perplexity of a subword model depends on its vocabulary. To compare it with a model of bytes or
characters on the same text, use the bits per byte, which evaluation prints too.

Fine-tuning starts from a trained model. This is a workdir (of a training run or a conversion), or a
folder that `python -m txl_jax.convert RUN --to=safetensors FOLDER` wrote:

    python -m txl_jax.main --config=configs/my_text.py:fine_tune --workdir=runs/tuned \\
        --config.data.path=OTHER_TEXT --config.train.start_from=runs/mine
    python -m txl_jax.main --mode=evaluate --workdir=runs/tuned
    python -m txl_jax.main --mode=generate --workdir=runs/tuned --config.generate.prompt="It was"

The variant fine_tune sets neither the model's shape nor the kind of token: both come from the
starting model, and so does the vocabulary. A word that is not in the vocabulary becomes <unk>. If
the vocabulary has no <unk>, or if the text has an unknown character, the run stops before training
and names the word or character. Bytes and subwords can encode every text. Dropout, learning rate
and lengths are set by the config of the new run. A model without memory needs
--config.{train,validate,evaluate}.mem_len=0. To score the model on the new text before fine-tuning,
use `--mode=evaluate --workdir=runs/mine` with --config.data.path=OTHER_TEXT.
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
        config.train.start_from = "WORKDIR_OF_THE_MODEL"  # a placeholder: the command sets it
        config.checkpoint.every = 100
    if variant == "smoke":
        config.train.update({"steps": 20, "log_every": 5, "eval_every": 0})
        config.optimizer.warmup_steps = 5
        config.validate.max_segments = config.evaluate.max_segments = 4
        config.generate.length = 32
    return config
