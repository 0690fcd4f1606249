"""Test `baton models`: the list is complete and true, the page is current, and a model's memory is shown."""

from collections import defaultdict
from pathlib import Path

import pytest
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from cluster.cli import main
from cluster.models import markdown
from engine.models.families import FAMILIES, read_model_config
from engine.models.families.listing import NAMES, parts_of
from tests.cluster.harness import DEMO
from tests.engine.families import CONFIGS, kind_of

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_current() -> None:
    assert (ROOT / "docs" / "models.md").read_text() == markdown(), "run `baton models --markdown > docs/models.md`"


def test_the_list_names_every_family_and_what_its_models_contain(tmp_path: Path) -> None:
    """CONFIGS has configurations of each family. The list must name every part that the layers of these models have."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for name, config in CONFIGS.items():
        where = tmp_path / name
        kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), kind_of(config))
        config.architectures = [kind.__name__]
        config.save_pretrained(where)
        read = read_model_config(where)
        found[read.architecture].update(parts_of(read))
    assert {name: tuple(sorted(parts)) for name, parts in found.items()} == {
        name: parts for name, (_, parts) in NAMES.items()
    }
    assert set(NAMES) == set(FAMILIES)


def test_the_memory_of_a_model_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", str(DEMO)]) == 0
    printed = capsys.readouterr().out
    assert "KV of a token" in printed
    assert "requests of 1,024 tokens" in printed
    assert main(["models", "/nowhere"]) == 2
    assert "/nowhere" in capsys.readouterr().err
    assert main(["models"]) == 0
    assert "Qwen3-Next" in capsys.readouterr().out
