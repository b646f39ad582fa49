"""What is said to be installed can be: from a clone, for the name tuneloop is not ours on any index."""

import re
import tomllib

from page_files import PAGES, ROOT, name_of

CODE = ("cli", "explorer", "runner", "shared", "trainer", "examples", "deploy", "scripts", "tests/doubles")
#: An extra of a package: of a folder, as from a clone (`./runner[tune]`), or of a name on an index.
NAMED = re.compile(r"""(tuneloop(?:-runner)?|\./runner|(?<=[\s"'=])\.)\[([a-z0-9, -]+)\]""")


def extras(folder: str) -> set[str]:
    return set(tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]["optional-dependencies"])


def texts() -> dict[str, str]:
    files = [
        file
        for folder in CODE
        for file in (ROOT / folder).rglob("*")
        if file.suffix in {".py", ".yaml", ".service", ""}
    ]
    files = [*PAGES, *(file for file in files if file.is_file())]
    return {name_of(file): file.read_text(errors="replace") for file in files}


def test_every_extra_that_is_named_exists_and_is_not_asked_of_an_index() -> None:
    known = {".": extras("."), "./runner": extras("runner")}
    found = 0
    for name, text in texts().items():
        for package, listed in NAMED.findall(text):
            found += 1
            assert package in known, f'{name}: {package}[{listed}] is on no index; write ./runner ".[{listed}]"'
            assert set(listed.replace(" ", "").split(",")) <= known[package], f"{name}: {package}[{listed}]"
    assert found >= 10


def test_an_extra_is_found() -> None:
    said = 'pip install tuneloop[parquet] ./runner ".[gpu,trainer]" and ./runner[tune], a[b]'
    assert NAMED.findall(said) == [("tuneloop", "parquet"), (".", "gpu,trainer"), ("./runner", "tune")]
