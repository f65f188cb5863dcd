#!/usr/bin/env python3
"""Write docs/settings.md and docs/patches.md from the declarations they describe; --check only compares."""

import argparse
import sys
from pathlib import Path

from qwen38_3090 import patches, settings

DOCS = Path(__file__).resolve().parent.parent / "docs"


def settings_page() -> str:
    """The table of settings."""
    rows = [
        f"| `{name}` | {values.replace('|', '<br>')} | {default} | {meaning} |"
        for name, values, default, meaning in settings.table()
    ]
    switches = ", ".join(f"`{module.PATCH.switch}`" for module in patches.modules())
    return "\n".join(
        [
            "# Settings",
            "",
            "Environment variables, also read from a file `.env` in the working directory, which is the checkout with "
            "`scripts/serve.sh` and `verify.sh` (the environment wins). "
            "Unset takes the default; an empty value means off, or is refused where off makes no sense. Every option "
            "not listed here goes to vLLM unchanged: "
            "`python -m qwen38_3090.serve --max-num-seqs 4`, or in `EXTRA_ARGS`.",
            "",
            "| name | values | default | meaning |",
            "|---|---|---|---|",
            *rows,
            "",
            "Each patch has a switch of its own, and `0` turns it off: " + switches + ".",
            "",
            "Made by `scripts/make_docs.py` from `qwen38_3090/settings.py`.",
            "",
        ]
    )


def patches_page() -> str:
    """One section a patch, from the registry."""
    sections = []
    for module in patches.modules():
        patch = module.PATCH
        places = patch.applies_to
        sections += [
            f"## {patch.name}",
            "",
            patch.why,
            "",
            f"- where: {', '.join(places.platforms)}; runner {', '.join(places.runners)}; {places.modes}",
            f"- switch: `{patch.switch}=0`",
            f"- upstream: {patch.upstream}",
            f"- retires when: {patch.retires_when}",
            "- targets: " + ", ".join(f"`{target.path}` ({target.fingerprint})" for target in patch.targets),
            "",
        ]
    return "\n".join(
        [
            "# Patches",
            "",
            "What this project changes in vLLM 0.27.1, in order of application. A patch applies only while each of its "
            "targets has the source of 0.27.1 (the fingerprint); `python -m qwen38_3090.patches` prints their state.",
            "",
            *sections,
            "Made by `scripts/make_docs.py` from the registry in `patches/`.",
            "",
        ]
    )


def main() -> None:
    """Write the pages, or exit with status 1 when one is stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only; status 1 when a page is stale")
    check = parser.parse_args().check
    stale = []
    for name, page in (("settings.md", settings_page()), ("patches.md", patches_page())):
        path = DOCS / name
        if path.is_file() and path.read_text(encoding="utf-8") == page:
            continue
        stale.append(name)
        if not check:
            path.write_text(page, encoding="utf-8")
    if check and stale:
        sys.exit(f"stale: {', '.join(stale)}; run scripts/make_docs.py")


if __name__ == "__main__":
    main()
