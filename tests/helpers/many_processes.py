"""The command as several processes of one run, which find each other over loopback."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time

from places import ROOT

SPY = """
import json, sys
from txl_jax.data.streams import Streams
seen, window = set(), Streams.window

def spied(self, start, n, rows=slice(None), epoch=0):
    seen.update(range(*rows.indices(self.batch_size)))
    return window(self, start, n, rows, epoch)

Streams.window = spied
from absl import app
from txl_jax import main

def run(argv):
    code = main.main(argv)
    import jax
    with open(sys.argv[0] + f".rows-{jax.process_index()}", "w") as file:
        json.dump(sorted(seen), file)
    return code

sys.argv = sys.argv[1:]
app.run(run, flags_parser=main.parse_flags)
"""
"""``main``, and at its end which rows of the text this process has read, as JSON."""


QUICK = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
"""A start is mostly compiling; this halves it (measured: 15 s of a core where it was 29 s)."""


class Processes:
    """N processes of one command, each with its output in a file; ended when it is left."""

    def __init__(self, folder, n, *arguments, devices=1, heartbeat=60, spy=None, slurm=False):
        """Starts them.

        Args:
          folder: for their outputs.
          n: how many; 1 is started as a user starts one.
          arguments: of ``txl_jax.main``.
          devices: of each.
          heartbeat: seconds of silence after which one counts as dead.
          spy: path; ``spy.rows-I`` will hold the rows that process I has read.
          slurm: started as srun does: what says who is who is in the environment.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.outputs = [folder / f"output-{i}.txt" for i in range(n)]
        program = ["-m", "txl_jax.main"] if spy is None else ["-c", SPY, str(spy)]
        address = f"127.0.0.1:{free_port()}"
        self.all = []
        job = job_with_free_port() if slurm else None
        for i, output in enumerate(self.outputs):
            run = [f"--coordinator={address}", f"--num_processes={n}", f"--process_id={i}"]
            run = [*(["--distributed"] if slurm else run), f"--heartbeat_seconds={heartbeat}"]
            environment = of_slurm(job, n, i) if slurm else {}
            with open(output, "wb") as file:
                process = subprocess.Popen(
                    [sys.executable, *program, *map(str, arguments), *(run if n > 1 else [])],
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    cwd=ROOT,
                    env={
                        **os.environ,
                        "JAX_NUM_CPU_DEVICES": str(devices),
                        **QUICK,
                        **environment,
                    },
                    start_new_session=True,
                )
            self.all.append(process)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self.all:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()

    def wait(self, timeout=240):
        """Exit codes and outputs once all have ended; a hang fails."""
        limit = time.monotonic() + timeout
        self.until(lambda: all(p.poll() is not None for p in self.all), limit)
        return [p.returncode for p in self.all], [self.output(i) for i in range(len(self.all))]

    def until(self, true, limit=None):
        """Waits for something; fails, with what the processes said, at a time."""
        limit = limit or time.monotonic() + 240
        while not true():
            if time.monotonic() > limit:
                told = [self.output(i)[-2000:] for i in range(len(self.all))]
                raise AssertionError("\n---\n".join(["what was waited for did not come", *told]))
            time.sleep(0.02)

    def until_step(self, metrics, step):
        """Waits until ``metrics.jsonl`` has a record of a step, or one later."""

        def there():
            ended = [p.returncode for p in self.all if p.poll() is not None]
            assert not ended, self.output(0)
            lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
            return any(json.loads(x)["step"] >= step for x in lines if x.endswith("\n"))

        self.until(there)

    def output(self, i):
        """What a process has said so far, on either stream."""
        return self.outputs[i].read_text(errors="replace")


def free_port():
    """One that nothing listens on."""
    with socket.socket() as at:
        at.bind(("127.0.0.1", 0))
        return at.getsockname()[1]


def of_slurm(job, n, i):
    """What srun tells process i of n on one machine, as far as JAX asks."""
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": str(n),
        "SLURM_PROCID": str(i),
        "SLURM_LOCALID": str(i),
        "SLURM_STEP_NUM_NODES": "1",
    }


def job_with_free_port():
    """A job's number from which JAX makes a port that nothing listens on."""
    for job in range(os.getpid() % 4096, 8192):
        with contextlib.suppress(OSError), socket.socket() as at:
            at.bind(("127.0.0.1", job % 4096 + 61440))
            return job
    raise AssertionError("no free port")


def ran(folder, n, *arguments, timeout=240, **more):
    """Runs N processes to their end, which must be good; their outputs."""
    with Processes(folder, n, *arguments, **more) as processes:
        codes, outputs = processes.wait(timeout)
    assert codes == [0] * n, "\n---\n".join(outputs)
    return outputs
