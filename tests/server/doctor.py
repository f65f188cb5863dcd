"""What the doctor's tests share."""

from argparse import Namespace

from qwen38_3090.demo import MODEL_DIR


def command_line(**changes):
    """vLLM's reading of a command line, as far as the doctor looks at it."""
    values = {
        "model": str(MODEL_DIR), "tokenizer": None, "chat_template": None, "trust_remote_code": False,
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 3}, "served_model_name": ["demo"],
        "host": "127.0.0.1", "port": 1, "api_key": None, "ssl_certfile": None,
        "kv_cache_dtype": "auto", "attention_backend": None, "enable_prefix_caching": True,
    }  # fmt: skip
    return Namespace(**values | changes)


def by_check(findings):
    """check -> finding, in order; each check must report once."""
    findings = list(findings)
    found = {finding.check: finding for finding in findings}
    assert len(found) == len(findings)
    return found


def statuses(found):
    return {finding.status for finding in found.values()}
