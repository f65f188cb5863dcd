"""python -m qwen38_3090.serve: check the settings, say what will be served, run vLLM's server in this process."""

import argparse
import json
import os
import shlex
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from dotenv import load_dotenv

from qwen38_3090 import checks, modes, settings
from qwen38_3090.api import KEYS_VARIABLE
from qwen38_3090.launch import Launch, Machine, launch
from qwen38_3090.mtp_ignore import IgnoreModules, forgotten_modules
from qwen38_3090.patches.patch import PatchRefused, installed_platform, require_pinned_vllm
from qwen38_3090.settings import SettingError, Settings


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve, or print what would be served. Exit status 2 when a setting can't work."""
    own, vllm_arguments = _parser().parse_known_args(arguments)
    try:
        plan = resolve([word for word in vllm_arguments if word != "--"])
        if own.dry_run:
            print(dry_run_text(plan))
            return
        os.environ.update(plan.env)
        parsed = parse_for_vllm(plan.argv)
        check(parsed, plan)
        complete_ignore_list(parsed, plan)
        os.environ[KEYS_VARIABLE] = "\n".join(api_keys(parsed))
    except (SettingError, PatchRefused) as error:
        sys.exit(_fail(str(error)))
    print(banner(plan, parsed), flush=True)
    threading.Thread(target=_announce, args=(parsed,), daemon=True).start()
    _run(parsed)


def resolve(vllm_arguments: Sequence[str] = ()) -> Launch:
    """The launch for this environment, `.env` and machine. Raises SettingError or PatchRefused."""
    try:
        load_dotenv(Path(".env"))
    except ValueError as error:
        raise SettingError(
            f"{Path('.env').absolute()} can't be read ({error}): write UTF-8 lines NAME=value."
        ) from None
    require_pinned_vllm()
    return launch(Settings.read(), machine(), os.environ, vllm_arguments)


def machine() -> Machine:
    """The machine this runs on."""
    version = Path("/proc/version")
    wsl2 = version.is_file() and "microsoft" in version.read_text().lower()
    return Machine(stack=installed_platform(), wsl2=wsl2)


def parse_for_vllm(argv: Sequence[str]) -> argparse.Namespace:
    """vLLM's own reading of its command line; with the patches applied, as its parser loads the plugins.

    Raises SettingError for options that vLLM refuses together, SystemExit (argparse's) for those it does not know.
    """
    from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser(prog="python -m qwen38_3090.serve"))
    try:
        parsed = parser.parse_args(list(argv))
        validate_parsed_serve_args(parsed)
    except (TypeError, ValueError) as error:
        raise SettingError(str(error)) from None
    if parsed.model_tag is not None:
        parsed.model = parsed.model_tag
    return parsed


def api_keys(parsed: argparse.Namespace) -> list[str]:
    """The keys that the server asks for; none when it asks for none."""
    return [key for key in parsed.api_key or [os.environ.get("VLLM_API_KEY")] if key]


def check(parsed: argparse.Namespace, plan: Launch) -> None:
    """Everything that can be known to fail before loading. Raises SettingError."""
    mode = modes.load(plan.mode)
    method = (parsed.speculative_config or {}).get("method")
    checks.check_model(parsed.model, method, mode.download if parsed.model == mode.model else None)
    checks.check_port(parsed.host or "0.0.0.0", parsed.port)
    checks.check_gpu(mode.stack)


def complete_ignore_list(parsed: argparse.Namespace, plan: Launch) -> None:
    """Let vLLM load an MTP module that the checkpoint's quantization_config forgets to exempt."""
    if (parsed.speculative_config or {}).get("method") != "mtp":
        return
    forgotten = forgotten_modules(Path(parsed.model))
    if forgotten and not callable(parsed.hf_overrides):
        parsed.hf_overrides = IgnoreModules(forgotten, parsed.hf_overrides)
        plan.notes.append(f"the MTP module is in bf16, which config.json does not say; {len(forgotten)} names added")


def banner(plan: Launch, parsed: argparse.Namespace) -> str:
    """What is served, a line each, from vLLM's reading of the final command line."""
    speculation = parsed.speculative_config or {}
    drafts = f"{speculation['method']}, {speculation['num_speculative_tokens']} drafts" if speculation else "off"
    context = parsed.max_model_len or "the model's own"
    requests = parsed.max_num_seqs or "any number of"
    key = "with your API key" if api_keys(parsed) else "no API key"
    where = "127.0.0.1 only" if parsed.host == "127.0.0.1" else f"listening on {parsed.host or 'every address'}"
    access = f"{where}, {key}"
    rows = {
        "mode": f"{plan.mode}: {modes.load(plan.mode).summary}",
        "model": parsed.model,
        "context": f"{context} tokens (CTX={plan.context}), up to {requests} requests at once",
        "speculation": drafts,
        "KV cache": f"{parsed.kv_cache_dtype}, prefix caching {'on' if parsed.enable_prefix_caching else 'off'}",
        "patches": f"{len(plan.patches)}: {', '.join(plan.patches)}",
        "URL": f"{url(parsed)}/v1 ({access})",
        "served as": ", ".join(parsed.served_model_name or [parsed.model]),
    }
    lines = [f"{name:>12}  {value}" for name, value in rows.items()]
    return "\n".join([*lines, *(f"{'note':>12}  {note}" for note in plan.notes)])


def dry_run_text(plan: Launch) -> str:
    """The resolved command, environment and patch list."""
    secret = {"VLLM_API_KEY"}
    environment = [f"  {key}={'***' if key in secret else value}" for key, value in sorted(plan.env.items())]
    return "\n".join(
        [
            f"mode: {plan.mode}, context: {plan.context}",
            "command:",
            "  vllm serve " + " ".join(map(shlex.quote, plan.argv)),
            "environment:",
            *environment,
            "patches:",
            *(f"  {name}" for name in plan.patches),
            *(f"note: {note}" for note in plan.notes),
        ]
    )


def url(parsed: argparse.Namespace) -> str:
    """Where a client on this machine reaches the server."""
    host = "127.0.0.1" if parsed.host in (None, "0.0.0.0", "::") else parsed.host
    return f"{'https' if parsed.ssl_certfile else 'http'}://{f'[{host}]' if ':' in host else host}:{parsed.port}"


def _announce(parsed: argparse.Namespace) -> None:
    """Print a line to try as soon as the server answers."""
    while True:
        try:
            with urllib.request.urlopen(f"{url(parsed)}/health", timeout=2):
                break
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    body = {"model": (parsed.served_model_name or [parsed.model])[0]}
    body["messages"] = [{"role": "user", "content": "Who are you?"}]
    key = ' -H "Authorization: Bearer $VLLM_API_KEY"' if api_keys(parsed) else ""
    text = (
        f"\nReady at {url(parsed)}/v1. Try:\n  curl {url(parsed)}/v1/chat/completions{key} "
        f"-H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}\n\n"
    )
    # Past sys.stdout, to which vLLM adds its prefix: the line is there to be copied.
    os.write(sys.stdout.fileno(), text.encode())


def _run(parsed: argparse.Namespace) -> None:
    from vllm.entrypoints.cli.serve import ServeSubcommand

    ServeSubcommand.cmd(parsed)


def _parser() -> argparse.ArgumentParser:
    rows = "\n".join(f"  {name:14} {meaning} Default: {default}." for name, _, default, meaning in settings.table())
    parser = argparse.ArgumentParser(
        prog="python -m qwen38_3090.serve",
        description=__doc__,
        epilog=f"settings (environment or .env; unset is the default, empty is off):\n{rows}\n\n"
        "Every other option goes to vLLM unchanged and wins over ours.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--dry-run", action="store_true", help="print vLLM's command, environment and patches")
    return parser


def _fail(message: str) -> int:
    print("\n".join(f"qwen38_3090: {line}" for line in message.splitlines()), file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
