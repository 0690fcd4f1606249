"""The tree keeps its shape: size caps, unique class names, documented large classes, short functions, allowed imports."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = [
    "router",
    "node",
    "prefill_node",
    "decode_node",
    "scheduler",
    "engine",
    "shared",
    "compare",
    "cluster",
    "benchmarks",
    "demo",
    "deploy",
]
CORE = ("router", "node", "prefill_node", "decode_node", "scheduler", "engine", "shared")
OPTIONAL_ENGINE = ("cpu", "cuda")
MAX_CORE_LINES = 14_500  # the serving path, without kernels for one kind of device
MAX_LINES = 27_000  # all Python outside tests
MAX_TEST_LINES = 28_000
DOCUMENTED_LINES = 60  # a class longer than this has a docstring
MAX_FUNCTION_LINES = 60
KERNELS = ("engine/cpu/", "engine/cuda/")


def sources(*rooms: str) -> list[Path]:
    return [path for room in rooms for path in sorted((ROOT / room).rglob("*.py"))]


def num_lines(paths: list[Path]) -> int:
    return sum(path.read_text().count("\n") for path in paths)


def is_optional(path: Path) -> bool:
    parts = path.relative_to(ROOT).parts
    return parts[0] == "engine" and parts[1] in OPTIONAL_ENGINE


def classes(path: Path) -> Iterator[ast.ClassDef]:
    for item in ast.parse(path.read_text()).body:
        if isinstance(item, ast.ClassDef):
            yield item


def length(item: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (item.end_lineno or item.lineno) - item.lineno + 1


def test_sizes_stay_below_their_caps() -> None:
    core = num_lines([path for path in sources(*CORE) if not is_optional(path)])
    assert core <= MAX_CORE_LINES, f"the serving path has {core} lines"
    assert (total := num_lines(sources(*ROOMS))) <= MAX_LINES, f"all Python outside tests has {total} lines"
    assert (tests := num_lines(sources("tests"))) <= MAX_TEST_LINES, f"the tests have {tests} lines"


def test_a_public_class_name_exists_once() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in sources(*ROOMS):
        for item in classes(path):
            if not item.name.startswith("_"):
                places[item.name].append(str(path.relative_to(ROOT)))
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_large_classes_have_a_docstring() -> None:
    assert not [
        f"{path.relative_to(ROOT)}:{item.name}"
        for path in sources(*ROOMS)
        for item in classes(path)
        if length(item) > DOCUMENTED_LINES and not ast.get_docstring(item)
    ]


def test_functions_outside_kernels_are_short() -> None:
    assert not [
        f"{path.relative_to(ROOT)}:{item.name} has {length(item)} lines"
        for path in sources(*ROOMS)
        if not str(path.relative_to(ROOT)).startswith(KERNELS)
        for item in ast.walk(ast.parse(path.read_text()))
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and length(item) > MAX_FUNCTION_LINES
    ]


def test_a_test_file_imports_no_other_test_file() -> None:
    wrong = []
    for path in sources("tests"):
        for item in ast.walk(ast.parse(path.read_text())):
            module = item.module if isinstance(item, ast.ImportFrom) else None
            if module and module.startswith("tests.") and module.rsplit(".", 1)[-1].startswith("test_"):
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong
