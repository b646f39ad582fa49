"""No bytes of ours can run code when they are read, and nothing is given to a shell."""

import ast

from sources import SOURCES

FORBIDDEN = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
UNPICKLERS = {("torch", "load"), ("torch", "save"), ("yaml", "load"), ("yaml", "unsafe_load"), ("yaml", "full_load")}
SHELLS = {
    *(("os", "system"), ("os", "popen"), ("subprocess", "getoutput"), ("subprocess", "getstatusoutput")),
    ("asyncio", "create_subprocess_shell"),
}
RUNNERS = UNPICKLERS | SHELLS


def unsafe(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [each.name for each in node.names if each.name.split(".")[0] in FORBIDDEN]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {(node.module, each.name) for each in node.names}
            found += [node.module] if node.module.split(".")[0] in FORBIDDEN else []
            found += [".".join(each) for each in names & RUNNERS]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found += [f"{node.value.id}.{node.attr}"] if (node.value.id, node.attr) in RUNNERS else []
        elif isinstance(node, ast.keyword) and node.arg in {"allow_pickle", "shell"}:
            found += [] if isinstance(node.value, ast.Constant) and node.value.value is False else [node.arg]
    return found


def test_nothing_of_ours_pickles_or_calls_a_shell():
    assert {str(source.path): unsafe(source.tree) for source in SOURCES if unsafe(source.tree)} == {}


def test_what_pickles_is_found():
    code = "import pickle, dill.x\nfrom torch import load\ntorch.load(f)\nyaml.load(f)\nload(f, allow_pickle=True)"
    found = ["allow_pickle", "dill.x", "pickle", "torch.load", "torch.load", "yaml.load"]
    assert sorted(unsafe(ast.parse(code))) == found


def test_a_shell_is_found():
    code = "from os import popen\nos.system('a')\nsubprocess.run('a', shell=True)\nrun(shell=False)"
    assert sorted(unsafe(ast.parse(code))) == ["os.popen", "os.system", "shell"]
