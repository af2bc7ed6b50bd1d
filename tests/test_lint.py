"""The project's own rules, read from the syntax tree of every file; each rule is shown to catch its offence.

| rule           | where it holds                      | why                                                    |
|----------------|-------------------------------------|--------------------------------------------------------|
| collectives    | all but spmd/collectives.py         | a raw `psum` of an equal value counts copies, silently |
| shard_map      | all but spmd/program.py             | one place sets the mesh, the axes and the check        |
| check_vma      | everywhere, tests and notebooks     | without it a forgotten reduction is a wrong number     |
| environment    | all but runtime/                    | what a run does is in its configuration                |
| package root   | all but the commands                | `jaxmoe/__init__.py` imports every floor               |
| unfinished     | everywhere                          | what is not done is an issue, not a comment            |
"""

import ast
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parents[1]
COMMANDS = ("train", "verify", "plan", "generate", "convert", "bench", "report")
FLOORS = (
    *("config", "spmd", "kernels", "model", "losses", "metrics"),
    *("optim", "data", "checkpoint", "interop", "generation", "step", "runtime"),
)

#: Public names of `jax.lax`, in any supported version, that communicate between ranks, ask for the rank or the size
#: of an axis, or change over which axes a type varies. `jax.lax` also has their primitives, with the ending "_p".
COLLECTIVES = frozenset(
    """all_gather all_to_all axis_index axis_size pbroadcast pcast pmax pmean pmin ppermute precv psend pshuffle psum
    psum_scatter psum_scatter_start pswapaxes pvary ragged_all_to_all""".split()
)
ENVIRONMENT = frozenset({"os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv"})


class Names(ast.NodeVisitor):
    """Every dotted name that a file uses, with import and assignment aliases spelled out, and its line."""

    def __init__(self, tree: ast.AST) -> None:
        self.aliases: dict[str, str] = {}
        self.used: list[tuple[int, str]] = []
        self.visit(tree)

    def resolve(self, node: ast.AST) -> str | None:
        """`lax.psum` as "jax.lax.psum" after `from jax import lax`; None for what is no dotted name."""
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.resolve(node.value)
            return f"{owner}.{node.attr}" if owner else None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            owner, name = self.resolve(node.args[0]), node.args[1]
            attribute = name.value if isinstance(name, ast.Constant) else "<computed>"
            return f"{owner}.{attribute}" if owner else None
        return None

    def visit_Import(self, node: ast.Import) -> None:
        for name in node.names:
            self.used.append((node.lineno, name.name))
            self.aliases[name.asname or name.name.split(".")[0]] = name.name if name.asname else name.name.split(".")[0]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for name in node.names:
            self.used.append((node.lineno, f"{node.module}.{name.name}"))
            self.aliases[name.asname or name.name] = f"{node.module}.{name.name}"

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        value = self.resolve(node.value)
        for target in node.targets:
            if value and isinstance(target, ast.Name):
                self.aliases[target.id] = value

    def generic_visit(self, node: ast.AST) -> None:
        dotted = self.resolve(node)
        if dotted and isinstance(node, ast.expr):
            self.used.append((node.lineno, dotted))
        super().generic_visit(node)


def collectives(path: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    if path == "jaxmoe/spmd/collectives.py" or not path.startswith(("jaxmoe/", "launch/")):
        return
    for line, name in Names(tree).used:
        module, _, leaf = name.rpartition(".")
        if name.startswith("jax._src"):
            yield line, f"{name}: JAX's private modules are off limits"
        elif module == "jax.lax" and leaf.removesuffix("_p") in {*COLLECTIVES, "*", "<computed>"}:
            yield line, f"{name}: use a verb of jaxmoe/spmd/collectives.py"


def shard_map(path: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    if not path.startswith(("jaxmoe/", "launch/")):
        return
    if path == "jaxmoe/spmd/program.py":
        names = Names(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and names.resolve(node.func) == "jax.shard_map":
                if "check_vma" not in [keyword.arg for keyword in node.keywords]:
                    yield node.lineno, "shard_map without check_vma=True"
        return
    for line, name in Names(tree).used:
        if name.startswith("jax.") and name.rpartition(".")[2] in ("shard_map", "smap", "pmap"):
            yield line, f"{name}: use manual() of jaxmoe/spmd/program.py"


def check_vma(path: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in ("check_vma", "check_rep"):
            if not (isinstance(node.value, ast.Constant) and node.value.value is True):
                yield node.value.lineno, f"{node.arg} must be the constant True"
        if isinstance(node, ast.Dict):
            for key in node.keys:
                if isinstance(key, ast.Constant) and key.value in ("check_vma", "check_rep"):
                    yield key.lineno, f"{key.value} in a dict hides its value: pass it as a keyword"


def environment(path: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    if path.startswith("jaxmoe/") and not path.startswith("jaxmoe/runtime/"):
        for line, name in Names(tree).used:
            if name in ENVIRONMENT or name == "os.*":
                yield line, f"{name}: environment variables are read in jaxmoe/runtime/ only"


def package_root(path: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    if not path.startswith("jaxmoe/") or path in [f"jaxmoe/{name}.py" for name in ("__init__", *COMMANDS)]:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and "jaxmoe" in [name.name for name in node.names]:
            yield node.lineno, "import jaxmoe: import from the file that defines the name"
        if isinstance(node, ast.ImportFrom) and node.module == "jaxmoe":
            for name in node.names:
                if name.name not in FLOORS:
                    yield node.lineno, f"from jaxmoe import {name.name}: import from the file that defines it"


Rule = Callable[[str, ast.AST], Iterator[tuple[int, str]]]
RULES: tuple[Rule, ...] = (collectives, shard_map, check_vma, environment, package_root)


def unfinished(source: str) -> list[int]:
    """Lines with a mark of unfinished work."""
    mark = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X")) + r")\b")
    return [number for number, line in enumerate(source.splitlines(), start=1) if mark.search(line)]


def files(*suffixes: str) -> list[Path]:
    tops = ("jaxmoe", "tests", "launch", "configs")
    found = [path for top in tops for path in (ROOT / top).rglob("*") if path.suffix in suffixes]
    return sorted(path for path in found if "__pycache__" not in path.parts)


def python_source(path: Path) -> str:
    """A module's text; of a notebook the code cells, without the lines that are not Python."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    cells = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    return re.sub(r"(?m)^(\s*)[%!].*$", r"\1pass", "\n".join(cells))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_tree_keeps(rule: Rule) -> None:
    problems = []
    for path in files(".py", ".ipynb"):
        name = path.relative_to(ROOT).as_posix()
        problems += [f"{name}:{line}: {text}" for line, text in rule(name, ast.parse(python_source(path)))]
    assert not problems, "\n" + "\n".join(problems)


def test_nothing_is_marked_unfinished() -> None:
    texts = files(".py", ".sh", ".yaml", ".md", ".ipynb")
    problems = [f"{path.relative_to(ROOT)}:{line}" for path in texts for line in unfinished(path.read_text("utf-8"))]
    assert not problems, "\n" + "\n".join(problems)


BAD = [
    (collectives, "jaxmoe/model/a.py", "import jax\njax.lax.psum(x, 'dp')"),
    (collectives, "jaxmoe/model/a.py", "from jax import lax\nlax.all_gather(x, 'tp')"),
    (collectives, "jaxmoe/model/a.py", "from jax import lax as l\nl.ppermute(x, 'pp', p)"),
    (collectives, "jaxmoe/model/a.py", "import jax.lax as l\nl.pmean(x, 'dp')"),
    (collectives, "jaxmoe/model/a.py", "import jax.lax\njax.lax.axis_index('dp')"),
    (collectives, "jaxmoe/model/a.py", "from jax.lax import psum"),
    (collectives, "jaxmoe/model/a.py", "from jax.lax import psum as add"),
    (collectives, "jaxmoe/model/a.py", "from jax.lax import *"),
    (collectives, "jaxmoe/model/a.py", "import jax\nreduce = jax.lax.psum_scatter"),
    (collectives, "jaxmoe/model/a.py", "import jax\nl = jax.lax\nl.pcast(x, 'dp', to='varying')"),
    (collectives, "jaxmoe/model/a.py", "import jax\ndef f(x):\n    return jax.vmap(jax.lax.pmax)(x)"),
    (collectives, "jaxmoe/model/a.py", "from jax import lax\ngetattr(lax, 'all_to_all')(x)"),
    (collectives, "jaxmoe/model/a.py", "from jax import lax\ngetattr(lax, name)(x)"),
    (collectives, "jaxmoe/model/a.py", "from jax._src.lax.parallel import psum_p"),
    (collectives, "jaxmoe/model/a.py", "from jax.lax import all_gather_p\nall_gather_p.bind(x)"),
    (collectives, "jaxmoe/spmd/program.py", "from jax import lax\nlax.psum(x, 'dp')"),
    (collectives, "jaxmoe/step/a.py", "def f():\n    from jax import lax\n    return lax.ragged_all_to_all"),
    (shard_map, "jaxmoe/step/a.py", "import jax\njax.shard_map(f, check_vma=True)"),
    (shard_map, "jaxmoe/step/a.py", "from jax import shard_map as s"),
    (shard_map, "jaxmoe/step/a.py", "from jax.experimental.shard_map import shard_map"),
    (shard_map, "jaxmoe/step/a.py", "import jax\njax.pmap(f)"),
    (shard_map, "jaxmoe/spmd/program.py", "import jax\njax.shard_map(f, mesh=mesh)"),
    (check_vma, "jaxmoe/spmd/program.py", "import jax\njax.shard_map(f, check_vma=False)"),
    (check_vma, "tests/a.py", "partial(jax.shard_map, check_vma=False)"),
    (check_vma, "tests/a.py", "shard_map(f, check_rep=False)"),
    (check_vma, "jaxmoe/spmd/program.py", "shard_map(f, check_vma=strict)"),
    (check_vma, "launch/notebooks/a.ipynb", "shard_map(f, **{'check_vma': False})"),
    (environment, "jaxmoe/model/a.py", "import os\nos.environ['A']"),
    (environment, "jaxmoe/data/a.py", "import os as o\no.getenv('A')"),
    (environment, "jaxmoe/train.py", "from os import environ\nenviron.get('A')"),
    (environment, "jaxmoe/step/a.py", "import os\nos.environ['A'] = '1'"),
    (package_root, "jaxmoe/step/a.py", "import jaxmoe"),
    (package_root, "jaxmoe/step/a.py", "from jaxmoe import train_step"),
    (package_root, "jaxmoe/model/a.py", "from jaxmoe import train"),
]
GOOD = [
    (collectives, "jaxmoe/spmd/collectives.py", "from jax import lax\nlax.psum(x, 'dp')"),
    (collectives, "jaxmoe/model/a.py", "from jax import lax\nlax.scan(f, a, b)\nlax.stop_gradient(x)"),
    (collectives, "jaxmoe/model/a.py", "from jaxmoe.spmd.collectives import gather\ngather(x, 'tp', 0)\nx.psum()"),
    (shard_map, "jaxmoe/spmd/program.py", "import jax\njax.shard_map(f, mesh=mesh, check_vma=True)"),
    (check_vma, "tests/a.py", "jax.shard_map(f, check_vma=True)"),
    (environment, "jaxmoe/runtime/a.py", "import os\nos.environ['A']"),
    (environment, "jaxmoe/data/a.py", "import os\nos.replace(a, b)\nself.environ"),
    (package_root, "jaxmoe/train.py", "import jaxmoe"),
    (package_root, "jaxmoe/step/a.py", "from jaxmoe import losses\nimport jaxmoe.spmd.axes"),
]


def _ids(cases: list[tuple[Rule, str, str]]) -> list[str]:
    return [f"{rule.__name__}: {source}".replace("\n", "; ") for rule, _, source in cases]


@pytest.mark.parametrize(("rule", "path", "source"), BAD, ids=_ids(BAD))
def test_an_offence_is_found(rule: Rule, path: str, source: str) -> None:
    assert list(rule(path, ast.parse(source)))


@pytest.mark.parametrize(("rule", "path", "source"), GOOD, ids=_ids(GOOD))
def test_what_is_allowed_passes(rule: Rule, path: str, source: str) -> None:
    assert not list(rule(path, ast.parse(source)))


@pytest.mark.parametrize("text", ["# TO" + "DO: later", '"""FIX' + 'ME."""', "x = 1  # XX" + "X"])
def test_an_unfinished_mark_is_found(text: str) -> None:
    assert unfinished(f"fine\n{text}") == [2]


def test_every_collective_of_the_installed_jax_is_on_the_list() -> None:
    parallel = {name for name in dir(jax.lax) if getattr(jax.lax, name).__class__.__name__ == "function"}
    parallel = {name for name in parallel if getattr(jax.lax, name).__module__ == "jax._src.lax.parallel"}
    assert parallel, "jax moved its collectives: find their module and name it here"
    assert parallel <= COLLECTIVES, f"add {sorted(parallel - COLLECTIVES)} to COLLECTIVES"
