"""The benchmark of structured output counts what is valid, and nothing else."""

from __future__ import annotations

import json

import jsonschema

from benchmarks import structured

SCHEMA = {"type": "object", "properties": {"day": {"type": "string", "format": "date"}}, "required": ["day"]}


class Text:
    """A tokenizer of characters; 0 ends a sequence."""

    eos_token_ids = (0,)

    def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens)).rstrip("\0")


def test_only_what_ended_and_is_valid_counts() -> None:
    texts = [
        '{"day": "2026-11-30"}\0',
        '{"day": "30 November"}\0',
        '{"day": 1}\0',
        '{"day": "2026-11-30"}',
        "{\0",
        "\0",
    ]
    outputs = {f"date/{seed}": [ord(character) for character in text] for seed, text in enumerate(texts)}
    outputs["other/0"] = [ord("1"), 0]
    entries = [{"name": "date", "schema": SCHEMA}, {"name": "other", "schema": {"type": "integer"}}]
    rows = structured.validity(entries, Text(), structured.Run(outputs))  # type: ignore[arg-type]
    assert [(row["schema"], row["outputs"], row["ended"], row["valid"]) for row in rows] == [
        ("date", 6, 5, 1),
        ("other", 1, 1, 1),
    ]


def test_the_schemas_are_twenty_and_differ() -> None:
    entries = json.loads(structured._SCHEMAS.read_text())
    assert len(entries) == len({entry["name"] for entry in entries}) == 20
    assert len({json.dumps(entry["schema"]) for entry in entries}) == 20
    for entry in entries:
        jsonschema.Draft202012Validator.check_schema(entry["schema"])
