"""The patch framework: fingerprints, rebinding, refusal; and rules that hold for every patch."""

import importlib
import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from qwen38_3090.patches import patch as framework
from qwen38_3090.patches.patch import AppliesTo, Patch, PatchRefused, Rebinding, Target, fingerprint

from qwen38_3090 import patches

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def module(tmp_path, monkeypatch):
    """`module(source)` writes it to a module of its own name and returns that name; it is not imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    written = []

    def write(source, name=None):
        name = name or f"target_{os.getpid()}_{len(written)}_{tmp_path.name}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        framework._tree.cache_clear()
        written.append(name)
        return name

    yield write
    for name in written:
        sys.modules.pop(name, None)


def test_fingerprint_ignores_comments_layout_and_docstrings(module):
    plain = module("def f(a, b=1):\n    return a + b\n")
    dressed = module(
        '''
        # a comment
        def f(a,
              b=1):
            """What it does."""
            return (a + b)  # why
        '''
    )
    assert fingerprint(f"{plain}:f") == fingerprint(f"{dressed}:f")


@pytest.mark.parametrize(
    "source",
    [
        "def f(a, b=2):\n    return a + b\n",
        "def f(a, b=1):\n    return a - b\n",
        "def f(a, b=None):\n    return a + b\n",
        "def f(a, *, b=1):\n    return a + b\n",
        "async def f(a, b=1):\n    return a + b\n",
    ],
)
def test_fingerprint_sees_every_change_of_meaning(module, source):
    assert fingerprint(f"{module(source)}:f") != fingerprint(
        f"{module('def f(a, b=1):' + chr(10) + '    return a + b')}:f"
    )


def test_fingerprint_finds_methods_assignments_and_conditional_definitions(module):
    name = module(
        """
        LIMIT = 3
        if LIMIT:
            class A:
                def m(self): return LIMIT
        """
    )
    assert len({fingerprint(f"{name}:{where}") for where in ("LIMIT", "A", "A.m")}) == 3


def test_fingerprint_imports_nothing(module):
    name = module("raise RuntimeError\ndef f(): pass\n")
    fingerprint(f"{name}:f")
    assert name not in sys.modules


def test_fingerprint_of_what_does_not_exist(module):
    name = module("x = 1\n")
    with pytest.raises(LookupError, match=rf"{name}:gone does not exist"):
        fingerprint(f"{name}:gone")
    with pytest.raises(LookupError, match="no module"):
        fingerprint("no_such_package.module:f")


def _patch(*targets):
    return Patch(
        name="example", why="-", targets=targets, upstream="-", retires_when="-", switch="PATCH_EXAMPLE",
        applies_to=AppliesTo(),
    )  # fmt: skip


def test_a_target_that_differs_refuses_by_name(module):
    name = module("def f(): return 1\n")
    with pytest.raises(PatchRefused, match=f"(?s)patch example refuses: {name}:f .*PATCH_EXAMPLE=0"):
        _patch(Target(f"{name}:f", "0" * 16)).verify()
    with pytest.raises(PatchRefused, match=r"example refuses.*does not exist"):
        _patch(Target(f"{name}:g", "0" * 16)).verify()
    _patch(Target(f"{name}:f", fingerprint(f"{name}:f"))).verify()


def test_wrap_waits_for_the_import_and_reaches_copies(module):
    definer = module("def f(): return 'stock'\n")
    early, late = module(f"from {definer} import f\n"), module(f"from {definer} import f\n")
    rebinding = Rebinding()
    early_module = importlib.import_module(early)
    rebinding.wrap(f"{definer}:f", lambda original: lambda: original() + " patched", holders=(early, late))
    late_module = importlib.import_module(late)
    assert {early_module.f(), late_module.f(), sys.modules[definer].f()} == {"stock patched"}
    rebinding.undo()
    assert {early_module.f(), late_module.f(), sys.modules[definer].f()} == {"stock"}


def test_wrap_before_the_import(module):
    definer = module("class A:\n    def m(self): return 1\n    @staticmethod\n    def s(): return 2\n")
    rebinding = Rebinding()
    rebinding.wrap(f"{definer}:A.m", lambda original: lambda self: original(self) + 10)
    rebinding.wrap(f"{definer}:A.s", lambda original: staticmethod(lambda: original.__func__() + 10))
    assert rebinding.bound == 0
    a = importlib.import_module(definer).A
    assert (a().m(), a.s(), rebinding.bound) == (11, 12, 2)
    rebinding.undo()
    assert (a().m(), a.s(), rebinding.bound) == (1, 2, 0)


def test_what_was_undone_before_the_import_stays_undone(module):
    definer = module("def f(): return 1\n")
    rebinding = Rebinding()
    rebinding.wrap(f"{definer}:f", lambda original: lambda: 2)
    rebinding.undo()
    assert importlib.import_module(definer).f() == 1
    rebinding.wrap(f"{definer}:f", lambda original: lambda: 3)
    assert sys.modules[definer].f() == 3
    rebinding.undo()


def test_an_inherited_method_is_put_back_by_removing_ours(module):
    definer = module("class A:\n    def m(self): return 1\nclass B(A): pass\n")
    rebinding = Rebinding()
    rebinding.wrap(f"{definer}:B.m", lambda original: lambda self: original(self) + 1)
    b = importlib.import_module(definer).B
    assert b().m() == 2
    rebinding.undo()
    assert b().m() == 1 and "m" not in vars(b)


@pytest.mark.parametrize("name", patches.REGISTRY)
def test_each_patch_says_what_it_is(name):
    patch = importlib.import_module(f"qwen38_3090.patches.{name}").PATCH
    assert patch.name == name
    assert patch.targets and patch.why.endswith(".") and patch.upstream and patch.retires_when
    assert patch.switch.startswith("PATCH_")
    assert set(patch.applies_to.platforms) <= {"cuda", "cpu"} and set(patch.applies_to.runners) <= {"v1", "v2"}


@pytest.mark.parametrize("name", patches.REGISTRY)
def test_each_patch_fits_and_comes_off_again(name):
    module = importlib.import_module(f"qwen38_3090.patches.{name}")
    module.PATCH.verify()
    homes = {target.path.partition(":")[0] for target in module.PATCH.targets}
    before = {home: _names(importlib.import_module(home)) for home in homes}
    for _ in range(2):
        module.apply()
        changed = [home for home in homes if _names(sys.modules[home]) != before[home]]
        assert changed, "nothing was rebound in any target's module"
        module.revert()
        assert {home: _names(sys.modules[home]) for home in homes} == before


def _names(module):
    """Identities of a module's names and of its classes' own attributes."""
    found = {}
    for name, value in vars(module).items():
        found[name] = id(value)
        if isinstance(value, type) and value.__module__ == module.__name__:
            found |= {f"{name}.{key}": id(attribute) for key, attribute in vars(value).items() if key[:3] != "_ab"}
    return found


def test_switches_are_unique():
    switches = [module.PATCH.switch for module in patches.modules()]
    assert len(set(switches)) == len(switches)


def _in_new_process(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "VLLM_LOGGING_LEVEL": "INFO", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_apply_all_is_idempotent_and_logs_one_line():
    result = _in_new_process(
        """
        from qwen38_3090 import patches
        first = patches.apply_all(); second = patches.apply_all()
        assert [s.state for s in first] == [s.state for s in second]
        print({s.patch.name: s.state for s in first})
        """,
        PATCH_GDN_ACCEPT_BOUNDS="",
    )
    assert result.returncode == 0, result.stderr
    lines = [line for line in (result.stdout + result.stderr).splitlines() if "qwen38_3090 patches in" in line]
    assert len(lines) == 1 and "off: gdn_accept_bounds" in lines[0]
    assert "'gdn_accept_bounds': 'off'" in result.stdout and "'align_block_size': 'applied'" in result.stdout


def test_a_refusal_stops_the_process_before_anything_is_changed():
    result = _in_new_process(
        """
        import dataclasses
        from qwen38_3090 import patches
        from qwen38_3090.patches.patch import AppliesTo, Target
        module = patches.modules()[-1]
        wrong = dataclasses.replace(module.PATCH.targets[0], fingerprint="0" * 16)
        module.PATCH = dataclasses.replace(module.PATCH, targets=(wrong,), applies_to=AppliesTo())
        try:
            from vllm.plugins import load_general_plugins
            load_general_plugins()
        finally:
            print([s.state for s in patches.report()].count("applied"))
        """,
        VLLM_PLUGINS="qwen38_3090",
    )
    assert result.returncode == 1
    assert f"PatchRefused: patch {patches.REGISTRY[-1]} refuses" in result.stderr
    assert result.stdout.splitlines()[-1] == "0"


def test_another_vllm_version_is_refused(monkeypatch):
    monkeypatch.setattr(framework, "version", lambda name: "0.27.2")
    with pytest.raises(PatchRefused, match=r"patches vLLM 0\.27\.1 and no other version; installed is 0\.27\.2"):
        patches.apply_all()


def test_the_table_prints():
    result = _in_new_process("from qwen38_3090.patches.__main__ import main; main()")
    assert result.returncode == 0, result.stderr
    for name in patches.REGISTRY:
        assert name in result.stdout


def test_generated_pages_are_fresh():
    result = subprocess.run(
        [sys.executable, str(ROOT / "scripts/make_docs.py"), "--check"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


def test_logging_goes_to_vllms_logger():
    assert logging.getLogger("vllm.qwen38_3090").parent.name in ("vllm", "root")
