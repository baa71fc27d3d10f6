"""Locks a workdir in a bucket by an object that the lock's holder renews: a bucket has no flock.

The object is created only if there is none (``ifGenerationMatch=0``), so only one of two runs holds
the lock. A thread renews it every :data:`RENEWED_EVERY` seconds. Another run waits. If the object
changes, its holder is alive and keeps the lock. If it stays the same for :data:`EXPIRES_AFTER`
seconds, or its holder was a process of this machine that has ended, the other run removes it.
"""

import contextlib
import json
import os
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from txl_jax.paths import BUCKETS, store

RENEWED_EVERY, EXPIRES_AFTER = 15.0, 60.0  # seconds
_STEP = 1.0


class Lease:
    """The lock object ``address``; ``holder`` describes this process to other processes.

    ``lost`` is called once, by a thread, if another run removed or replaced the object.
    """

    def __init__(self, address: str, holder: dict[str, Any], lost: Callable[[], None]):
        self._token = secrets.token_hex(8)
        self._content = json.dumps({**holder, "machine": _machine(), "token": self._token})
        self._address, self._lost = address, lost
        self._object = tuple(address.removeprefix(BUCKETS).split("/", 1))
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True)

    def acquire(self, waiting: Callable[[], None]) -> bool:
        """Returns whether this process has the lock; calls ``waiting`` if it has to wait."""
        while not self._create():
            if (state := self._state()) is None:
                continue
            if not self._holder_ended():
                waiting()
                limit = time.monotonic() + EXPIRES_AFTER
                while time.monotonic() < limit:
                    time.sleep(_STEP)
                    if (now := self._state()) != state:
                        break
                if now is not None and now != state:
                    return False
            self._remove(state)
        self._generation = (self._state() or ("0",))[0]
        self._thread.start()
        return True

    def release(self) -> None:
        """Removes the lock, if this process has it."""
        if self._thread.is_alive():
            self._released.set()
            self._thread.join()
            with contextlib.suppress(Exception):  # if the client fails, the lock expires
                if (state := self._state()) and self._is_own():
                    self._remove(state)

    def _create(self) -> bool:
        try:
            store().pipe_file(self._address, self._content.encode(), mode="create")
        except FileExistsError:
            return self._is_own()  # own: the first request succeeded, its answer was lost
        return True

    def _state(self) -> tuple[str, str] | None:
        """Returns the object's generation and metageneration; ``None`` if there is no object."""
        try:
            found = store().call("GET", "b/{}/o/{}", *self._object, json_out=True)
        except FileNotFoundError:
            return None
        return found["generation"], found["metageneration"]

    def _read(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(store().cat_file(self._address))
            return found if isinstance(found, dict) else {}
        return {}

    def _is_own(self) -> bool:
        return self._read().get("token") == self._token

    def _holder_ended(self) -> bool:
        """Whether the holder is a process of this machine that has ended."""
        holder, machine = self._read(), _machine()
        pid = holder.get("pid")
        if machine is None or holder.get("machine") != machine or type(pid) is not int:
            return False
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        return False

    def _remove(self, state: tuple[str, str]) -> None:
        conditions = dict(zip(("ifGenerationMatch", "ifMetagenerationMatch"), state, strict=True))
        with contextlib.suppress(FileNotFoundError, FileExistsError):  # the object has changed
            store().call("DELETE", "b/{}/o/{}", *self._object, **conditions)

    def _renew(self) -> None:
        count = 0
        while not self._released.wait(RENEWED_EVERY):
            count += 1
            renewal = {"metadata": {"renewed": str(count)}}
            conditions = {"ifGenerationMatch": self._generation}
            try:
                store().call("PATCH", "b/{}/o/{}", *self._object, json=renewal, **conditions)
            except (FileNotFoundError, FileExistsError):
                self._lost()
                return
            except Exception:  # such as a network error; the next renewal may succeed
                continue


def _machine() -> str | None:
    """Returns an id of this boot and PID namespace, within which PIDs are unique, or ``None``."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return None
