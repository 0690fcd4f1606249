"""Test that docs/models.md is right about the classes of transformers: see `python -m tests.sweep`."""

import json

import pytest
import transformers

from cluster.models import NUMBER, SWEPT
from tests.engine.build import thinned
from tests.sweep.sweep import classes, isolated
from tests.sweep.tiny_configs import EXCEPTIONS

LISTED = json.loads(SWEPT.read_text())
IS_LISTED = pytest.mark.skipif(
    transformers.__version__ != LISTED["transformers"], reason="the list is that of another version of transformers"
)


@IS_LISTED
def test_the_list_has_every_class_and_most_without_a_configuration_made_by_hand() -> None:
    assert list(LISTED["classes"]) == classes()
    assert sum(not reason for name, reason in LISTED["classes"].items() if name not in EXCEPTIONS) >= 85


@IS_LISTED
@pytest.mark.parametrize("name", thinned(classes(), 20))
def test_a_class_gives_the_answers_of_transformers_or_is_refused_as_listed(name: str) -> None:
    assert NUMBER.sub("", isolated(name)) == NUMBER.sub("", LISTED["classes"][name])
