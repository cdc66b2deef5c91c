"""Merges the replies that several engines send to the same control call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Fields that are taken from the first reply: settings and estimates of an engine, or facts about one request.
_SAME = frozenset({"block_bytes", "window_seconds", "limit_gb_per_s", "ghost", "error", "num_cached_tokens"})
_NAMES = ("name", "source", "target")  # fields that identify a row of a table


def merged(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge replies. Add numbers, combine flags with `and`, merge table rows of equal `_NAMES`, and join metric series.

    The fields in `_SAME`, and values of other types, come from the first reply that contains them.
    """
    keys = dict.fromkeys(key for value in values for key in value)
    return {key: _merged_value(key, [value[key] for value in values if key in value]) for key in keys}


def _merged_value(key: str, values: Sequence[Any]) -> Any:
    first = next((value for value in values if value is not None), None)
    if isinstance(first, list | tuple):  # a table; skip the empty tables of new replicas
        first = next((value for value in values if value), first)
    match first:
        case _ if key in _SAME:
            return first
        case bool():
            return all(values)
        case int() | float():
            return sum(value for value in values if value is not None)
        case Mapping():
            return merged([value for value in values if value is not None])
        case list() | tuple() if key == "series":
            return [each for value in values for each in value]
        case list() | tuple() if first and all(isinstance(row, Mapping) for value in values if value for row in value):
            rows: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
            for row in (row for value in values if value for row in value):
                rows.setdefault(tuple(row.get(name) for name in _NAMES), []).append(row)
            return [merged(group) for group in rows.values()]
    return first


def labelled(metrics: Sequence[Mapping[str, Any]], replica: str) -> list[dict[str, Any]]:
    """Add the label `replica` to encoded CollectedMetrics, so that values of different replicas are not added."""
    return [
        {
            **metric,
            "labels": [*metric["labels"], "replica"],
            "series": [[[*labels, replica], value] for labels, value in metric["series"]],
        }
        for metric in metrics
    ]
