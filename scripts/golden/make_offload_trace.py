#!/usr/bin/env python3
"""Write tests/data/offload_trace.txt: the requests of an evening with a chat service, for comparing offload policies.

Conversations begin at random moments. Each has one of a few system prompts, some far more popular than others. A turn's
prompt is all that was said before and what the user adds; the user reads and thinks before the next one. Many
conversations end after one turn; some begin with a long document, which most users ask about once.

usage: make_offload_trace.py > tests/data/offload_trace.txt
"""
import heapq
import random

N_CONVERSATIONS = 700
SYSTEM_TOKENS = [1500, 900, 2400, 600, 1200, 300, 1800, 800]
MEAN_ARRIVAL_S = 6.0
MAX_CONTEXT = 16384


def length(rng, median, spread, low, high):
    return min(max(int(rng.lognormvariate(0, spread) * median), low), high)


def first_turn(rng, number, now):
    system = rng.choices(range(len(SYSTEM_TOKENS)), [1 / (i + 1) for i in range(len(SYSTEM_TOKENS))])[0]
    has_document = rng.random() < 0.15
    n_turns = 1 if rng.random() < 0.4 else 2 + int(rng.expovariate(1 / 4))
    if has_document and rng.random() < 0.6:
        n_turns = 1
    prompt = SYSTEM_TOKENS[system] + length(rng, 60, 0.9, 4, 1000)
    if has_document:
        prompt += length(rng, 5000, 0.5, 1500, 12000)
    return now, number, system, prompt, n_turns


def main():
    rng = random.Random(5)
    print("# time_ms conversation system_prompt system_tokens prompt_tokens output_tokens; scripts/golden/make_offload_trace.py")
    now = 0.0
    turns = []
    for number in range(N_CONVERSATIONS):
        now += rng.expovariate(1 / MEAN_ARRIVAL_S)
        heapq.heappush(turns, first_turn(rng, number, now))
    while turns:
        now, number, system, prompt, n_left = heapq.heappop(turns)
        output = length(rng, 150, 0.7, 8, 1200)
        print(int(now * 1000), number, system, SYSTEM_TOKENS[system], prompt, output)
        following = prompt + output + length(rng, 60, 0.9, 4, 1000)
        if n_left > 1 and following < MAX_CONTEXT:
            pause = 0.02 * output + rng.lognormvariate(0, 1) * 30
            heapq.heappush(turns, (now + pause, number, system, following, n_left - 1))


if __name__ == "__main__":
    main()
