"""Runs the command as several processes of one training run on this machine."""

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
"""A program that runs ``main``, then writes as JSON which rows of the batch it has read."""


QUICK = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
"""Halves the start-up of a process, which is mostly compilation.

Measured: 15 s of one core's time instead of 29 s.
"""


class Processes:
    """Processes that run one command together, each with its output in a file.

    At the end of the ``with`` block, processes that still run are killed.
    """

    def __init__(self, folder, n, *arguments, devices=1, heartbeat=60, spy=None, slurm=False):
        """Starts the processes.

        Args:
          folder: where the files with their outputs are written.
          n: number of processes; a single process gets no flags about other processes.
          arguments: the command line of ``txl_jax.main``.
          devices: number of CPU devices of each process.
          heartbeat: seconds of silence after which a process counts as dead.
          spy: path; ``spy.rows-I`` will hold the rows that process I has read.
          slurm: whether each process finds its number in environment variables, as with srun,
            and not in flags.
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
        """Returns exit codes and outputs when all have ended; fails after ``timeout`` seconds."""
        limit = time.monotonic() + timeout
        self.until(lambda: all(p.poll() is not None for p in self.all), limit)
        return [p.returncode for p in self.all], [self.output(i) for i in range(len(self.all))]

    def until(self, true, limit=None):
        """Waits until ``true()`` is true; fails with the outputs if ``limit`` comes first.

        ``limit`` is a time of ``time.monotonic``; by default, it is 240 seconds from now.
        """
        limit = limit or time.monotonic() + 240
        while not true():
            if time.monotonic() > limit:
                told = [self.output(i)[-2000:] for i in range(len(self.all))]
                raise AssertionError("\n---\n".join(["what was waited for did not come", *told]))
            time.sleep(0.02)

    def until_step(self, metrics, step):
        """Waits until ``metrics.jsonl`` has a record of ``step`` or of a later step."""

        def there():
            ended = [p.returncode for p in self.all if p.poll() is not None]
            assert not ended, self.output(0)
            lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
            return any(json.loads(x)["step"] >= step for x in lines if x.endswith("\n"))

        self.until(there)

    def output(self, i):
        """What process i has written so far to stdout and stderr."""
        return self.outputs[i].read_text(errors="replace")


def free_port():
    """A port that nothing listens on."""
    with socket.socket() as at:
        at.bind(("127.0.0.1", 0))
        return at.getsockname()[1]


def of_slurm(job, n, i):
    """The variables of srun that JAX reads, for process i of n on one machine."""
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": str(n),
        "SLURM_PROCID": str(i),
        "SLURM_LOCALID": str(i),
        "SLURM_STEP_NUM_NODES": "1",
    }


def job_with_free_port():
    """A job number from which JAX computes a port that nothing listens on."""
    for job in range(os.getpid() % 4096, 8192):
        with contextlib.suppress(OSError), socket.socket() as at:
            at.bind(("127.0.0.1", job % 4096 + 61440))
            return job
    raise AssertionError("no free port")


def ran(folder, n, *arguments, timeout=240, **more):
    """Runs ``n`` processes to their end and returns their outputs; every exit code must be 0."""
    with Processes(folder, n, *arguments, **more) as processes:
        codes, outputs = processes.wait(timeout)
    assert codes == [0] * n, "\n---\n".join(outputs)
    return outputs
