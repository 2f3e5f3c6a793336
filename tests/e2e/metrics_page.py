"""Reads a Prometheus text page strictly: what a scraper may rely on, checked line by line."""
import re

SAMPLE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)')
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"(?:,|$)')


def parse_labels(text):
    labels, at = {}, 0
    while at < len(text or ""):
        match = LABEL.match(text, at)
        assert match, f"malformed labels {text!r}"
        assert match[1] not in labels, f"label {match[1]} twice in {text!r}"
        labels[match[1]] = match[2]
        at = match.end()
    return labels


def parse(text):
    """{family: (type, {(name, frozenset of labels): value})}; fails on anything a scraper might stumble over."""
    assert text.endswith("\n") and "\r" not in text
    families, family, helped = {}, None, None
    for line in text.splitlines():
        if line.startswith("# HELP "):
            helped = line.split(" ", 3)[2]
            assert helped not in families and line.split(" ", 3)[3].endswith("."), line
        elif line.startswith("# TYPE "):
            _, _, family, kind = line.split(" ")
            assert family == helped, f"TYPE of {family} after HELP of {helped}"
            assert kind in ("counter", "gauge", "histogram")
            assert family.endswith("_total") == (kind == "counter"), f"{kind} {family}"
            families[family] = (kind, {})
        else:
            match = SAMPLE.fullmatch(line)
            assert match, f"malformed line {line!r}"
            name, labels, value = match[1], parse_labels(match[2]), float(match[3])
            kind, samples = families[family]
            parts = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
            assert name in [family + p for p in parts], f"{name} under {family}"
            key = (name, frozenset(labels.items()))
            assert key not in samples, f"{line!r} twice"
            samples[key] = value
    for name, (kind, samples) in families.items():
        if kind == "histogram":
            check_histogram(name, samples)
        elif kind == "counter":
            assert all(v >= 0 for v in samples.values()), name
    return families


def check_histogram(name, samples):
    series = {}
    for (part, labels), value in samples.items():
        rest = frozenset(x for x in labels if x[0] != "le")
        series.setdefault(rest, []).append((part[len(name):], dict(labels).get("le"), value))
    for entries in series.values():
        buckets = [(float(le), v) for part, le, v in entries if part == "_bucket"]
        bounds, counts = [b for b, _ in buckets], [v for _, v in buckets]
        assert bounds == sorted(set(bounds)) and bounds[-1] == float("inf"), f"{name}: {bounds}"
        assert counts == sorted(counts), f"{name} is not cumulative: {counts}"
        totals = {part: v for part, le, v in entries if le is None}
        assert set(totals) == {"_sum", "_count"} and totals["_count"] == counts[-1], name
        assert totals["_sum"] >= 0


def flatten(families):
    """{(sample name, labels): value} of the whole page."""
    return {key: value for _, samples in families.values() for key, value in samples.items()}


def rising(families):
    """What may never fall: counters, and buckets, sums and counts of histograms."""
    return flatten({name: f for name, f in families.items() if f[0] != "gauge"})
