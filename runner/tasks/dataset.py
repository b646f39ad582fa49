"""Reads datasets of tasks: JSON lines, JSON and CSV directly, other formats by Hugging Face `datasets`."""

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tuneloop.runner.errors import DatasetRefused, ExtraMissing


def written_rows(file: Path) -> Iterator[dict[str, Any]]:
    """Rows of a file as dictionaries. Raises DatasetRefused as `FILE:LINE: reason`."""
    try:
        yield from READERS[file.suffix.lower()](file)
    except UnicodeDecodeError as error:
        line = file.read_bytes()[: error.start].count(b"\n") + 1
        raise DatasetRefused(f"{file}:{line}: this is not UTF-8: {error.reason}") from None
    except OSError as error:
        raise DatasetRefused(f"{file}: {error.strerror}") from None


def _json_lines(file: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(_text(file).split("\n"), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DatasetRefused(f"{file}:{number}: this is not JSON: {error}") from None
            yield _object(row, f"{file}:{number}")


def _json(file: Path) -> Iterator[dict[str, Any]]:
    """A list of objects, an object with one list of them, or JSON lines."""
    text = _text(file)
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            yield from _json_lines(file)
            return
        raise DatasetRefused(f"{file}:{error.lineno}: this is not JSON: {error.msg}") from None
    if isinstance(found, dict):
        lists = [value for value in found.values() if isinstance(value, list)]
        if len(lists) != 1:
            yield found  # a single row
            return
        [found] = lists
    if not isinstance(found, list):
        raise DatasetRefused(f"{file}: this is {type(found).__name__}, not a list of objects")
    for number, row in enumerate(found, start=1):
        yield _object(row, f"{file}: entry {number}")


def _csv(file: Path) -> Iterator[dict[str, Any]]:
    """Values stay strings: `007` keeps its zeros."""
    with file.open(encoding="utf-8-sig", newline="") as text:
        reader = csv.reader(text, delimiter="\t" if file.suffix.lower() == ".tsv" else ",")
        header = next(reader, None)
        if header is None:
            return
        for row in reader:
            if len(row) != len(header) and row:
                raise DatasetRefused(f"{file}:{reader.line_num}: {len(row)} columns; the header has {len(header)}")
            if row:
                yield dict(zip(header, row, strict=True))


def _text(file: Path) -> str:
    data = file.read_bytes()
    return data.decode("utf-8-sig" if data.startswith(b"\xef\xbb\xbf") else "utf-8")


def _object(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DatasetRefused(f"{where}: a task must be an object, not {type(row).__name__}")
    return row


READERS: dict[str, Callable[[Path], Iterator[dict[str, Any]]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _csv,
}


Task = dict[str, Any]

_BUILDERS = {".parquet": "parquet", ".arrow": "arrow"}  # builders of `datasets` by file suffix

_SPLIT = re.compile(r"(?P<name>[\w.-]+)(?:\[(?P<start>-?\d+%?)?:(?P<stop>-?\d+%?)?\])?\Z")

_AFTER_SPLIT = "-_."  # separators after the split in a file's name: train-00000-of-00002.parquet
SELECTORS = ("sequential", "shuffle", "random", "offline_easy2hard")  # task orders, by Trinity's names


@dataclass(slots=True)
class DatasetConfig:
    """The source of tasks, and how often they are run.

    `split` may be a slice as in `datasets`: `train[:100]`, `train[10%:]`. `total_steps` wins over `total_epochs`. Each
    task gets `workflow_args`. `task_selector` has a `selector_type`: `sequential`, `shuffle` (a new order each epoch),
    `random` (each step draws), or `offline_easy2hard` (by `feature_keys`, largest first).
    """

    path: str
    name: str | None = None
    split: str | None = "train"
    total_epochs: int = 1
    total_steps: int | None = None
    workflow_args: Mapping[str, Any] | None = None
    task_selector: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Raises DatasetRefused."""
        self.path = str(self.path)
        for name, value in (("total_epochs", self.total_epochs), ("total_steps", self.total_steps)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise DatasetRefused(f"{name} must be a whole number of at least 1, not {value!r}")
        if self.selector_type not in SELECTORS:
            there = ", ".join(SELECTORS)
            raise DatasetRefused(f"task_selector: there is no {self.selector_type!r} here; there are {there}")
        if self.split is not None and not _SPLIT.match(self.split):
            raise DatasetRefused(f"split must be a name or a slice such as train[:100], not {self.split!r}")

    @property
    def selector_type(self) -> str:
        return str((self.task_selector or {}).get("selector_type") or "sequential")

    def preview(self, n: int = 5) -> list[Task]:
        """The first `n` tasks, also printed as JSON. Raises DatasetRefused, ExtraMissing."""
        tasks = list(islice(self._rows(), n))
        self._require(tasks)
        print(json.dumps(tasks, indent=2, ensure_ascii=False, default=str))  # noqa: T201
        return tasks

    def tasks(self) -> list[Task]:
        """All tasks in order. Raises DatasetRefused, ExtraMissing."""
        tasks = list(self._rows())
        self._require(tasks)
        if self.selector_type == "offline_easy2hard":
            keys = list((self.task_selector or {}).get("feature_keys") or ())
            if missing := [each for each in keys if each not in tasks[0]] or ["feature_keys"] * (not keys):
                raise DatasetRefused(f"task_selector: offline_easy2hard: there is no {missing[0]}")
            tasks.sort(key=lambda task: [float(task[each]) for each in keys], reverse=True)
        extra = {"workflow_args": dict(self.workflow_args)} if self.workflow_args else {}
        return [{**extra, **task} for task in tasks]

    def _require(self, tasks: Sequence[Task]) -> None:
        if not tasks:
            split = "" if self.split is None else f", split {self.split!r}"
            raise DatasetRefused(f"{self.path}{split}: there is no task in it")

    def _rows(self) -> Iterator[Task]:
        path = Path(self.path).expanduser()
        if path.is_file():
            # A file is one split: `train`, as in `datasets`, or the split in its name.
            wanted, named = self._slice(), _stem(path)
            if wanted is not None and wanted["name"] not in {"train", named}:
                raise DatasetRefused(
                    f"{path}: there is no split {wanted['name']!r}: a file is one, 'train' or {named!r}"
                )
            return _take_slice(_read_files([path]), wanted)
        if path.is_dir():
            folder = path if self.name is None else path / self.name
            if not folder.is_dir():
                there = ", ".join(sorted(each.name for each in path.iterdir() if each.is_dir())) or "no folder at all"
                raise DatasetRefused(f"{path}: there is no {self.name!r} in it; there is: {there}")
            return self._rows_of_folder(folder)
        if path.is_absolute() or self.path.startswith((".", "~")) or path.suffix in {*READERS, *_BUILDERS}:
            raise DatasetRefused(f"{self.path}: there is no such file or folder")
        datasets = _datasets(f"{self.path} is no local file or folder, so it is a name on the Hub")
        wanted = self._slice()
        try:
            split = None if wanted is None else wanted["name"]
            loaded = datasets.load_dataset(self.path, self.name, split=split, streaming=True)
        except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
            raise DatasetRefused(f"{self.path}: no file or folder here, and on the Hub: {error}") from error
        if isinstance(loaded, Mapping):
            raise DatasetRefused(f"{self.path} has several splits: split= one of {', '.join(sorted(loaded))}")
        return _take_slice(map(dict, loaded), wanted)

    def _rows_of_folder(self, folder: Path) -> Iterator[Task]:
        if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
            loaded = _datasets(f"{folder} was written by save_to_disk").load_from_disk(str(folder))
            wanted = self._slice()
            if hasattr(loaded, "column_names") and isinstance(loaded.column_names, dict):
                names = sorted(loaded)
                if wanted is None or wanted["name"] not in names:
                    raise DatasetRefused(f"{folder}: there is no split {self.split!r}; there are: {', '.join(names)}")
                loaded = loaded[wanted["name"]]
            return _take_slice(map(dict, loaded), wanted)
        found = splits_of(folder)
        if not found:
            kinds = ", ".join(sorted({*READERS, *_BUILDERS}))
            raise DatasetRefused(f"{folder}: there is no file of tasks in it ({kinds})")
        wanted = self._slice()
        if wanted is None:
            return _read_files([file for files in found.values() for file in files])
        if wanted["name"] not in found:
            raise DatasetRefused(
                f"{folder}: there is no split {wanted['name']!r}; there are: {', '.join(sorted(found))}"
            )
        return _take_slice(_read_files(found[wanted["name"]]), wanted)

    def _slice(self) -> re.Match[str] | None:
        """The split's name, and the bounds of its slice."""
        return None if self.split is None else _SPLIT.match(self.split)


def splits_of(folder: Path) -> dict[str, list[Path]]:
    """Files by split, named by a folder (except `data/`) or the start of the file's name; others are `train`."""
    files = [
        each
        for each in sorted(folder.rglob("*"))
        if each.is_file()
        and _suffix(each)
        and (not any(part.startswith((".", "_")) for part in each.relative_to(folder).parts))
    ]
    found: dict[str, list[Path]] = {}
    for file in files:
        parts = [part for part in file.relative_to(folder).parts[:-1] if part != "data"]
        found.setdefault(parts[0] if parts else _stem(file), []).append(file)
    known = {"train", "test", "validation", "valid", "dev", "eval"}
    if len(files) == 1 and not known & found.keys():
        return {"train": files, **found}
    return found


def _stem(file: Path) -> str:
    """The split in a file's name: `train` of train-00000-of-00002.parquet."""
    return re.split(rf"[{_AFTER_SPLIT}]\d", file.name.partition(".")[0])[0]


def _suffix(file: Path) -> str | None:
    suffix = file.suffix.lower()
    return suffix if suffix in READERS or suffix in _BUILDERS else None


def _read_files(files: Sequence[Path]) -> Iterator[Task]:
    for file in files:
        suffix = _suffix(file)
        if suffix is None:
            kinds = ", ".join(sorted({*READERS, *_BUILDERS}))
            raise DatasetRefused(f"{file}: its name must end in one of {kinds}")
        if suffix in READERS:
            yield from written_rows(file)
        else:
            datasets = _datasets(f"{file} is {suffix[1:]}")
            kind = _BUILDERS[suffix]
            yield from map(dict, datasets.load_dataset(kind, data_files=str(file), split="train", streaming=True))


def _take_slice(rows: Iterator[Task], wanted: re.Match[str] | None) -> Iterator[Task]:
    if wanted is None or (wanted["start"] is None and wanted["stop"] is None):
        return rows
    every = list(rows)
    bounds = [
        each if each is None else round(len(every) * int(each[:-1]) / 100) if each.endswith("%") else int(each)
        for each in (wanted["start"], wanted["stop"])
    ]
    return iter(every[slice(*bounds)])


def _datasets(why: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ExtraMissing("datasets", why) from error
    return datasets
