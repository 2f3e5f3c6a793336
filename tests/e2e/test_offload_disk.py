"""The disk tier where things go wrong: blocks that are not to be trusted, a file system that is full, engines that disagree about the bound."""
import concurrent.futures
import fcntl
import os
import pathlib
import random
import re
import shutil
import struct
import subprocess
import threading
import time

import pytest

from conftest import SLOW, wait_until
from kv_events import BlockRemoved
from test_kv_events import subscribe, urls
from test_offload import ask, ask_until, disk_flags, end, make, prompts, reset, wait_quiet, wanted  # noqa: F401


def files(folder):
    return {f.name for f in pathlib.Path(folder).glob("[0-9a-f][0-9a-f]/*-*-*")}


def test_what_gave_no_numbers_is_gone_from_disk(daemons, wanted, tmp_path):  # noqa: F811
    """For subscribers and for the next engine too; what is computed well later is kept again."""
    asked = prompts("sim", 2)
    want = wanted("sim", asked)
    bad = next(t for t in range(3, 2000) if all(t not in p for p in asked))
    url, replay_url = urls(tmp_path)
    flags = (*disk_flags(tmp_path), "--kv-events-url", url, "--kv-events-replay-url", replay_url, "--kv-events-topic", "kv")
    d = make(daemons, "sim", *flags, env={"PAGED_SIM_FAULTS": f"nan:{bad}"})
    s = subscribe(tmp_path)
    for p, w in zip(asked, want):
        ask_until(d, p, w, "host", 288)
    wait_quiet(tmp_path / "kv")
    kept = files(tmp_path / "kv")
    assert len(kept) == 2 * 19  # 300 tokens and 8 of the answer
    wait_until(lambda: s.sync() or len(s.held("DISK")) == len(kept))
    status, _, answer = d.request("POST", "/v1/completions", {"prompt": asked[0] + [bad], "max_tokens": 1})
    assert status == 500, answer
    wait_until(lambda: len(files(tmp_path / "kv")) == len(kept) - 18)
    gone = kept - files(tmp_path / "kv")
    wait_until(lambda: s.sync() or len(s.held("DISK")) == len(kept) - 18)
    told = {(e.medium, name) for _, batch in s.batches for e in batch.events if isinstance(e, BlockRemoved) for name in e.block_hashes}
    assert len({name for medium, name in told if medium == "DISK"}) == 18
    page = d.request("GET", "/metrics")[2]
    assert re.search(r'\npaged_kv_offload_distrusted_total\{[^}]*tier="disk"[^}]*\} 18\n', page), page
    s.close()
    end(d)
    d = make(daemons, "sim", *flags)
    d.wait_log("disk: ready ")
    assert not gone & files(tmp_path / "kv")
    assert ask(d, asked[1]) == (want[1], {"device": 0, "host": 0, "storage": 288})
    assert ask(d, asked[0]) == (want[0], {"device": 0, "host": 0, "storage": 0})
    ask_until(d, asked[0], want[0], "host", 288)
    wait_quiet(tmp_path / "kv")
    assert gone <= files(tmp_path / "kv")


def on_small_file_system(path, size):
    """What makes a daemon the only one to see a file system of that size at path; skips the test where that is not allowed."""
    path.mkdir()
    prefix = ["unshare", "-m" if os.geteuid() == 0 else "-rm", "sh", "-c", 'mount -t tmpfs -o "size=$1,mode=0700" paged "$2" && shift 2 && exec "$@"', "sh",
              str(size), path]
    if shutil.which("unshare") is None or subprocess.run([*prefix, "true"], capture_output=True).returncode != 0:
        pytest.skip("no mounts in a namespace here")
    return prefix


def test_full_file_system(daemons, wanted, tmp_path):  # noqa: F811
    """Less space than the bound, and others' files in it: new blocks take the place of old ones, with one warning; more is kept when there is space."""
    MB = 1 << 20
    asked = prompts("sim", 8)
    want = wanted("sim", asked)
    d = make(daemons, "sim", *disk_flags(tmp_path), "--sim-token-us", "500", memory="2M", prefix=on_small_file_system(tmp_path / "kv", 8 * MB))
    folder = pathlib.Path(f"/proc/{d.process.pid}/root/{tmp_path}/kv")
    assert os.statvfs(folder).f_blocks * os.statvfs(folder).f_frsize == 8 * MB

    def ask_all():
        for p, w in zip(asked, want):
            reset(d)
            assert ask(d, p)[0] == w, d.log()
            wait_quiet(folder)
        assert used_bytes(folder) == sum(f.stat().st_blocks * 512 for f in folder.glob("[0-9a-f][0-9a-f]/*-*-*"))

    other = folder / "lost+found" / "other"
    other.parent.mkdir()
    other.write_bytes(bytes(4 * MB))
    ask_all()
    assert 3.5 * MB < used_bytes(folder) <= 4 * MB
    reset(d)
    answer, details = ask(d, asked[-3])  # has left host memory
    assert answer == want[-3] and details["storage"] >= 128, (details, d.log())
    other.unlink()
    time.sleep(11)  # so long what fitted before is the bound
    ask_all()
    assert 7.5 * MB < used_bytes(folder) <= 8 * MB
    reset(d)
    answer, details = ask(d, asked[-5])
    assert answer == want[-5] and details["storage"] >= 128, (details, d.log())
    warnings = [line for line in d.log().splitlines() if " warn  engine disk: " in line]
    assert len(warnings) == 1 and "cannot write a block without giving up others: No space left" in warnings[0], d.log()


def used_bytes(folder):
    """Of all files, while nobody may change it: with the lock that every engine takes for that."""
    with open(folder / "accounts", "r+b") as accounts:
        fcntl.fcntl(accounts, fcntl.F_OFD_SETLKW, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
        return sum(f.stat().st_size for name in ("tmp", "[0-9a-f][0-9a-f]") for f in folder.glob(name + "/*-*"))


@pytest.mark.parametrize("kind", ["tiny", "sim"])
def test_engines_with_bounds_of_their_own(daemons, wanted, tmp_path, kind):  # noqa: F811
    """All files are never more than the larger one says, and no more than the smaller one says soon after; when that one has gone the other has its own room."""
    asked = prompts(kind, 6)
    want = wanted(kind, asked)
    folder = tmp_path / "kv"
    small, large = 1 << 20, 3 << 20
    a, b = (make(daemons, kind, *disk_flags(tmp_path, str(n)), memory="2M") for n in (small, large))
    for d in (a, b):
        d.wait_log("disk: ready ")
    stop = threading.Event()

    def load(d, seed):
        rng = random.Random(seed)
        while not stop.is_set():
            i = rng.randrange(len(asked))
            answer, _ = ask(d, asked[i])
            assert answer == want[i], d.log()
            if rng.random() < 0.3:
                d.request("POST", "/reset_prefix_cache")

    seen = []
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        loads = [pool.submit(load, d, seed) for seed, d in enumerate((a, b, a, b))]
        end_at = time.monotonic() + 6 * min(SLOW, 2)
        while time.monotonic() < end_at and not any(f.done() for f in loads):
            seen.append(used_bytes(folder))
            time.sleep(0.02)
        stop.set()
        for f in loads:
            f.result()
    assert 0 < max(seen) <= large
    assert max(seen) > small, "the larger one had no use for its room"
    for p, w in zip(asked, want):  # the larger one has the last word
        reset(b)
        assert ask(b, p)[0] == w, b.log()
    wait_until(lambda: used_bytes(folder) <= small, 5)
    time.sleep(1.5)
    assert 0 < used_bytes(folder) <= small
    end(a)
    for p, w in zip(asked, want):
        ask_until(b, p, w, "host", 288)
    wait_until(lambda: small < used_bytes(folder) <= large)
    for d in (a, b):
        assert " warn  engine disk: " not in d.log() and " error " not in d.log(), d.log()
