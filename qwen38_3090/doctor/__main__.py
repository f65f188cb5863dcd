"""python -m qwen38_3090.doctor: is this installation patched, are the weights right, does the server work?"""

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from qwen38_3090 import modes, serve
from qwen38_3090.doctor import environment, patching, server, weights
from qwen38_3090.doctor.finding import FAIL, PASS, SKIP, WARN, Finding, split_remedy
from qwen38_3090.patches.patch import PatchRefused
from qwen38_3090.settings import SettingError

# vLLM logs to stdout, which is ours.
_QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_LOGGING_STREAM": "ext://sys.stderr", "VLLM_NO_USAGE_STATS": "1"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what each check finds. Returns the exit status: 1 when one fails, else 0."""
    options = _parser().parse_args(arguments)
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    findings = []
    for finding in examine(options.install, options.server):
        findings.append(finding)
        if not options.json:
            print(finding.text(colour), flush=True)
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        counts = Counter(finding.status for finding in findings)
        print(", ".join(f"{counts[status]} {status}" for status in (PASS, WARN, FAIL, SKIP)))
    return int(any(finding.status == FAIL for finding in findings))


def examine(install: bool, live: bool) -> Iterator[Finding]:
    """Every finding, as it is made. install: environment and patches only. live: ask the running server too."""
    plan, problem = None, None
    try:
        plan = serve.resolve()
    except (SettingError, PatchRefused) as error:
        problem = error
    status = {}
    for finding in environment.check(install, os.environ):
        yield finding
        status[finding.check] = finding.status
    if isinstance(problem, SettingError):
        for line in str(problem).splitlines():
            yield Finding("environment", "settings", FAIL, *split_remedy(line))
    if FAIL in (status["vLLM"], status["torch"]):
        yield Finding("patches", "all", SKIP, "not checked before vLLM and torch are right")
        return
    yield from patching.check(importable=status.get("GPU") not in (SKIP, FAIL))
    if install:
        return
    if plan is None:
        yield Finding("weights", "all", SKIP, "not checked before the settings are right")
        return
    os.environ.update(plan.env)
    try:
        parsed = serve.parse_for_vllm(plan.argv)
    except (SystemExit, SettingError) as error:
        detail = "vLLM refuses its options" + ("" if isinstance(error, SystemExit) else f" ({error})")
        yield Finding("environment", "settings", FAIL, detail, "Correct EXTRA_ARGS; vLLM's own message is above.")
        return
    yield from weights.check(parsed, modes.load(plan.mode))
    if live:
        yield from server.check(parsed, os.environ)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verify.sh",
        description="Check environment, patches, weights and the running server. Exit status 1 when a check fails. "
        "Settings are those of `python -m qwen38_3090.serve`.",
        allow_abbrev=False,
    )
    parser.add_argument("--install", action="store_true", help="environment and patches only; needs no GPU, no weights")
    parser.add_argument("--no-server", dest="server", action="store_false", help="leave the running server out")
    parser.add_argument("--json", action="store_true", help="print a list of {group, check, status, detail, remedy}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
