"""Makes the ``smoke`` variant of a recipe."""


def smoke(config):
    """Changes a config so that a CPU can run it on a few hundred tokens of text; returns it.

    Sizes, lengths and numbers of steps become smaller. Settings that decide which code runs
    (attention, clusters, projections, window, clamp, memory or context, optimizer) do not change.
    """
    model, train = config.model, config.train
    model.update({"n_layer": 2, "d_model": 64, "n_head": 2, "d_head": 32, "d_inner": 64})
    if "cutoffs" in model:
        model.cutoffs = (10, 20, 30)
    train.update({"steps": 4, "log_every": 1, "eval_every": 0})
    train.steps_per_dispatch = 1
    if config.get("average", {}).get("swa_start"):
        config.average.swa_start = 2
    config.optimizer.warmup_steps = min(config.optimizer.warmup_steps, 2)
    for cut in (train, config.validate, config.evaluate):
        cut.batch_size = min(cut.batch_size, 4)
        cut.seg_len = 8
        cut.mem_len = min(cut.mem_len, 16)
        cut.context_len = min(cut.get("context_len", 0), 8)
        if "warm_start" in cut:
            cut.warm_start = 16
    if train.get("seg_len_std"):
        train.update({"seg_len": 10, "seg_len_std": 1.0})
    config.validate.max_segments = config.evaluate.max_segments = 4
    if config.evaluate.get("clamp_len", -1) > 0:
        config.evaluate.clamp_len = 12
    if "ablation" in config:
        config.ablation.lengths = (8, 16)
    config.generate = {"prompt": config.get("generate", {}).get("prompt", ""), "length": 4}
    config.checkpoint.every = 4
    return config
