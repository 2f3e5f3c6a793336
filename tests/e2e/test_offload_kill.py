"""Engines with a host tier and a disk tier that are too small, killed at random moments under load and started again on the same directory.

Every answer is that of a daemon without tiers, the files stay within the bound, and what dead engines had not finished goes away.
PAGED_KILLS=200 is the long run, PAGED_KILL_SEED repeats one."""
import concurrent.futures
import os
import pathlib
import random
import signal
import threading
import time

import pytest
from conftest import wait_until
from test_offload import ask, disk_flags, make, prompts, wanted  # noqa: F401

KILLS = int(os.environ.get("PAGED_KILLS", "6"))
SEED = int(os.environ.get("PAGED_KILL_SEED", time.time_ns() % 1000000))
# Host tier, disk tier: a part of what the prompts need.
SIZES = {"sim": ("2M", 4 << 20), "tiny": ("2M", 4 << 20)}


def used_bytes(folder):
    """Of all blocks, those being written included. Exact when nobody writes."""
    sizes = {}
    for path in pathlib.Path(folder).glob("*/*"):
        try:
            st = path.stat()
        except FileNotFoundError:
            continue
        sizes[st.st_ino] = st.st_size  # one that was moved meanwhile is found twice
    return sum(sizes.values())


def load(daemon, asked, want, stop, rng):
    """Asks until the daemon is gone; a wrong answer is told, a lost connection is the end."""
    while not stop.is_set():
        i = rng.randrange(len(asked))
        try:
            answer, details = ask(daemon, asked[i])
        except OSError:
            return None
        except Exception as e:  # http.client's: cut off in the middle
            if daemon.process.poll() is not None or stop.is_set():
                return None
            raise e
        if answer != want[i]:
            return f"prompt {i}: {answer} instead of {want[i]}, cached {details}"
    return None


@pytest.mark.parametrize("kind", SIZES)
def test_killed_at_random_moments(daemons, wanted, tmp_path, kind):  # noqa: F811
    rng = random.Random(SEED)
    print(f"PAGED_KILL_SEED={SEED}")
    memory, disk = SIZES[kind]
    asked = prompts(kind, 4)
    want = wanted(kind, asked)
    folder = tmp_path / "kv"
    from_disk = 0
    for _ in range(max(KILLS // len(SIZES), 1)):
        d = make(daemons, kind, *disk_flags(tmp_path, str(disk)), memory=memory)
        d.wait_log("disk: ready ")
        assert not list((folder / "tmp").iterdir())
        i = rng.randrange(len(asked))
        answer, details = ask(d, asked[i])
        assert answer == want[i], d.log()
        from_disk += details["storage"]
        stop = threading.Event()
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            loads = [pool.submit(load, d, asked, want, stop, random.Random(rng.random())) for _ in range(3)]
            time.sleep(rng.random() * 1.5)
            d.process.send_signal(signal.SIGKILL)
            d.process.wait()
            stop.set()
            assert [f.result() for f in loads] == [None] * 3, d.log()
        d.log_file.close()
        assert "Sanitizer" not in d.log() and "wrong" not in d.log(), d.log()
        assert used_bytes(folder) <= disk
    d = make(daemons, kind, *disk_flags(tmp_path, str(disk)), memory=memory)
    d.wait_log("disk: ready ")
    for p, w in zip(asked, want):
        answer, details = ask(d, p)
        assert answer == w, d.log()
        from_disk += details["storage"]
    assert from_disk > 0, d.log()
    wait_until(lambda: not list((folder / "tmp").iterdir()))
    wait_until(lambda: used_bytes(folder) <= disk)
