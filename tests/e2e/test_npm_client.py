"""The released OpenAI client of npm, unmodified, as users of JavaScript point it at the daemon."""
import json
import os
import pathlib
import shutil
import subprocess

import pytest
from conftest import CACHE, SLOW

VERSION = "6.49.0"


@pytest.fixture(scope="module")
def package():
    """Directory with node_modules/openai; fetched once."""
    if not shutil.which("node") or not shutil.which("npm"):
        pytest.skip("node and npm are not installed")
    directory = CACHE.parent / f"npm-openai-{VERSION}"
    if not (directory / "node_modules" / "openai" / "package.json").exists():
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "package.json").write_text('{"private": true}')
        fetched = subprocess.run(["npm", "install", "--no-audit", "--no-fund", f"openai@{VERSION}"], cwd=directory, capture_output=True,
                                 text=True, timeout=300)
        assert fetched.returncode == 0, fetched.stderr
    return directory


def test_the_npm_client_streams(package, tiny):
    script = pathlib.Path(__file__).with_name("npm_client.mjs")
    p = subprocess.run(["node", script, package, tiny.url + "/v1"], capture_output=True, text=True, timeout=60 * SLOW,
                       env={**os.environ, "NO_PROXY": "127.0.0.1"})
    assert p.returncode == 0, p.stderr
    got = json.loads(p.stdout)
    assert got["text"] == got["whole"] == tiny.text("In the beginning", max_tokens=24, temperature=0)
    assert got["finish"] in ("length", "stop") and got["usage"]["completion_tokens"] <= 24
    assert got["error"] == {"name": "BadRequestError", "status": 400, "param": "temperature"}
    assert got["n"] == 3
    tiny.idle()
