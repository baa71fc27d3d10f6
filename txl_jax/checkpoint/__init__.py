"""Models on disk: checkpoints and their checksums, workdirs, exported folders, the Hub."""
