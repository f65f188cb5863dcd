"""The doctor against a real server of the demo model."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.server


def verify(server, directory, **changes):
    result = subprocess.run(
        [sys.executable, "-m", "qwen38_3090.doctor", "--json"],
        env={**server.environment, **changes}, cwd=directory, capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    return result.returncode, {(it["group"], it["check"]): it for it in json.loads(result.stdout)}


def test_everything_passes(server, tmp_path):
    status, found = verify(server, tmp_path)
    assert status == 0, [it for it in found.values() if it["status"] == "FAIL"]
    live = {check: it for (group, check), it in found.items() if group == "live server"}
    assert {check: it["status"] for check, it in live.items()} == {
        "health": "PASS", "models": "PASS", "KV pool": "PASS", "attention": "SKIP", "completion": "PASS",
        "second turn": "PASS", "drafts": "PASS",
    }  # fmt: skip
    assert server.base_url in live["health"]["detail"] and server.model in live["models"]["detail"]
    cached = int(live["second turn"]["detail"].split()[0])
    assert cached > 0
    assert not [it for (group, _), it in found.items() if group == "patches" and it["status"] not in ("PASS", "SKIP")]


def test_settings_that_are_not_the_servers(server, tmp_path):
    status, found = verify(server, tmp_path, KV="fp8", PREFIX_CACHE="")
    pool = found["live server", "KV pool"]
    assert status == 0 and pool["status"] == "WARN" and "not what the settings here say" in pool["detail"]
    assert found["live server", "second turn"]["status"] == "PASS"


def test_a_key_that_the_server_refuses(plain_server, tmp_path):
    status, found = verify(plain_server, tmp_path, VLLM_API_KEY="wrong")
    assert status == 1 and found["live server", "models"]["remedy"] == "Set VLLM_API_KEY to the server's."


def test_a_server_without_drafts_and_prefix_cache(plain_server, tmp_path):
    status, found = verify(plain_server, tmp_path)
    assert status == 0
    assert found["live server", "completion"]["status"] == "PASS"
    assert found["live server", "second turn"]["status"] == found["live server", "drafts"]["status"] == "SKIP"
