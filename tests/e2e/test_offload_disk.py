"""The disk tier where things go wrong: blocks that are not to be trusted, a file system that is full, engines that disagree about the bound."""
import pathlib
import re

from conftest import wait_until
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
