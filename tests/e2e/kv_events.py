"""A subscriber of KV events, written from proto/README.md alone, with the structs that vLLM's subscribers decode by.

`Subscriber` follows the stream over NNG and keeps what is cached: `known` maps (medium, group, name) to (parent, tokens, extra keys). It fills gaps
by replay, starts late by snapshot, and takes a new snapshot when a replay cannot help or the server is another one.
"""
import struct
import time
from typing import Any

import msgspec
import pynng


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(EventBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


decode = msgspec.msgpack.Decoder(KVEventBatch).decode
END = 2**64 - 1
LAST_PIECE = 2**32 - 1


def apply(known, batch):
    for e in batch.events:
        if isinstance(e, AllBlocksCleared):
            known.clear()
        elif isinstance(e, BlockRemoved):
            for name in e.block_hashes:
                known.pop((e.medium, e.group_idx, name), None)
        else:
            n = e.block_size if e.token_ids else 0
            assert len(e.token_ids) == n * len(e.block_hashes)
            parent = e.parent_block_hash
            for i, name in enumerate(e.block_hashes):
                tokens = tuple(e.token_ids[i * n:(i + 1) * n])
                known[e.medium, e.group_idx, name] = (parent if tokens else None, tokens, e.extra_keys and e.extra_keys[i])
                parent = name


class Subscriber:
    def __init__(self, url, replay_url, topic="", late=False):
        self.sub = pynng.Sub0(dial=url, topics=topic.encode() + b"\0", recv_timeout=20)
        self.req = pynng.Req0(dial=replay_url, recv_timeout=5000)
        self.known = {}
        self.batches = []  # (seq, batch)
        self.next_seq = 0
        self.incarnation = None
        self.snapshots = 0
        time.sleep(0.1)  # until the subscription stands
        if late:
            self.take_snapshot()

    def close(self):
        self.sub.close()
        self.req.close()

    def ask(self, request):
        self.req.send(request)
        return self.req.recv()

    def take_snapshot(self):
        """Piece by piece; between two pieces the stream goes on, and each piece holds up to its own number."""
        self.known.clear()
        self.snapshots += 1
        cursor, first = 0, True
        while cursor != LAST_PIECE:
            answer = self.ask(b"S" + struct.pack(">I", cursor))
            assert answer[:1] == b"S"
            incarnation, seq, cursor = struct.unpack(">QQI", answer[1:21])
            if not first and incarnation == self.incarnation and seq > self.next_seq:
                self.replay(seq)
            elif not first and incarnation != self.incarnation:
                return self.take_snapshot()
            self.incarnation, self.next_seq, first = incarnation, seq, False
            apply(self.known, decode(answer[21:]))

    def replay(self, until=END):
        while True:
            answer = self.ask(b"R" + struct.pack(">Q", self.next_seq))
            assert answer[:1] == b"R"
            incarnation, = struct.unpack(">Q", answer[1:9])
            if incarnation != self.incarnation:
                return self.take_snapshot()
            at = 9
            while at < len(answer):
                seq, n = struct.unpack(">QI", answer[at:at + 12])
                payload = answer[at + 12:at + 12 + n]
                at += 12 + n
                if seq == END or seq >= until:
                    return
                if seq != self.next_seq:
                    return self.take_snapshot()
                self.take(seq, payload)

    def take(self, seq, payload):
        batch = decode(payload)
        self.batches.append((seq, batch))
        apply(self.known, batch)
        self.next_seq = seq + 1

    def follow(self):
        """Takes what the stream has brought."""
        while True:
            try:
                frame = self.sub.recv()
            except pynng.Timeout:
                return
            _, rest = frame.split(b"\0", 1)
            seq, incarnation = struct.unpack(">QQ", rest[:16])
            if self.incarnation is None and seq == 0:
                self.incarnation = incarnation
            if incarnation != self.incarnation:
                self.take_snapshot()
            elif seq == self.next_seq:
                self.take(seq, rest[16:])
            elif seq > self.next_seq:
                self.replay()

    def sync(self):
        """Until nothing has come for a while."""
        n = None
        while n != self.next_seq:
            n = self.next_seq
            self.follow()
            time.sleep(0.06)
        if self.incarnation is not None:
            self.replay()

    def held(self, medium):
        return {key[1:] for key in self.known if key[0] == medium}

    def predict(self, tokens, block_size, media=("GPU",)):
        """Leading tokens of the prompt that are cached, as a router finds them."""
        children = {(parent, tokens_): name for (medium, group, name), (parent, tokens_, _) in self.known.items()
                    if medium in media and group == 0}
        parent, n = None, 0
        while n + block_size < len(tokens) and (parent, tuple(tokens[n:n + block_size])) in children:
            parent = children[parent, tuple(tokens[n:n + block_size])]
            n += block_size
        return n
