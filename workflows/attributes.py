"""Search attributes: what an operator can filter workflows by. SQL visibility has room for three Int attributes."""

from __future__ import annotations

from typing import Any

from temporalio.common import SearchAttributeKey, SearchAttributePair, TypedSearchAttributes

RUN = SearchAttributeKey.for_keyword("GyreRun")
STATE = SearchAttributeKey.for_keyword("GyreState")
TASK = SearchAttributeKey.for_keyword("GyreTask")
FAMILY = SearchAttributeKey.for_keyword("GyreFamily")
HARNESS = SearchAttributeKey.for_keyword("GyreHarness")
CELL = SearchAttributeKey.for_keyword("GyreCell")
ROLE = SearchAttributeKey.for_keyword("GyreRole")
STEP = SearchAttributeKey.for_int("GyreStep")
WATER_LEVEL = SearchAttributeKey.for_int("GyreWaterLevel")
VERSION = SearchAttributeKey.for_int("GyreVersion")
REWARD = SearchAttributeKey.for_float("GyreReward")

ALL: tuple[SearchAttributeKey[Any], ...] = (
    RUN, STATE, TASK, FAMILY, HARNESS, CELL, ROLE, STEP, WATER_LEVEL, VERSION, REWARD,
)  # fmt: skip
"""Every attribute that must be registered in the namespace before a workflow starts."""


def registration() -> dict[str, str]:
    """Attribute name -> type as Temporal's command line writes it, e.g. for `--search-attribute GyreRun=Keyword`."""
    return {key.name: _TYPES[key.indexed_value_type.name] for key in ALL}


_TYPES = {"KEYWORD": "Keyword", "INT": "Int", "DOUBLE": "Double"}


def attributes(*pairs: tuple[SearchAttributeKey[Any], Any]) -> TypedSearchAttributes:
    """Search attributes for starting a workflow; pairs whose value is None are left out."""
    return TypedSearchAttributes([SearchAttributePair(key, value) for key, value in pairs if value is not None])
