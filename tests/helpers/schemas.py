"""JSON schemas of every kind that is supported, and of those that are not."""

from __future__ import annotations

from typing import Any

_NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}]}},
    "required": ["v", "next"],
    "additionalProperties": False,
}


def _variant(kind: str, name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"kind": {"const": kind}, name: schema},
        "required": ["kind", name],
        "additionalProperties": False,
    }


SUPPORTED: dict[str, dict[str, Any]] = {
    "closed object": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "open object": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    "no type": {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
    "required without a schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["b"],
    },
    "map": {"type": "object", "additionalProperties": {"type": "integer"}},
    "map with bounds": {
        "type": "object",
        "additionalProperties": {"type": "integer"},
        "minProperties": 1,
        "maxProperties": 1,
    },
    "other properties": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "additionalProperties": {"type": "string", "maxLength": 4},
    },
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^x_": {"type": "integer"}},
        "additionalProperties": False,
    },
    "odd keys": {
        "type": "object",
        "properties": {'naïve "q"': {"type": "integer"}, "日本\n": {"type": "boolean"}},
        "required": ['naïve "q"', "日本\n"],
        "additionalProperties": False,
    },
    "true and false": {"type": "object", "properties": {"a": True, "b": False}, "required": ["a"]},
    "anything": {},
    "annotations": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "T",
        "description": "d",
        "default": 3,
        "examples": [1],
        "deprecated": True,
        "type": "integer",
    },
    "enum": {"enum": ["x", 1, None, True, {"a": [1, 2]}, 'é"\\']},
    "const": {"const": {"k": [1, "two", None, "<|im_end|>"]}},
    "several types": {"type": ["string", "null"], "maxLength": 2},
    "number": {"type": "number", "minimum": -1.5, "maximum": 2.25},
    "open number": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "integer": {"type": "integer", "exclusiveMinimum": -3, "exclusiveMaximum": 12},
    "large integer": {"type": "integer", "minimum": 10**15, "maximum": 10**15 + 10},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": -21, "maximum": 500},
    "decimal multiple": {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 10},
    "minimum alone": {"minimum": 5},
    "length": {"type": "string", "minLength": 3, "maxLength": 5},
    "one character": {"type": "string", "minLength": 1, "maxLength": 1},
    "pattern": {"type": "string", "pattern": r"^[A-Z]{2}-\d{3}$"},
    "pattern anywhere": {"type": "string", "pattern": "ab+c", "maxLength": 30},
    "pattern and length": {"type": "string", "pattern": "^a*b*$", "maxLength": 4},
    **{
        f"format {name}": {"type": "string", "format": name}
        for name in ("date", "time", "date-time", "duration", "ipv4", "ipv6", "uuid", "uri")
    },
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "string", "maxLength": 3}, {"type": "integer"}],
        "items": False,
        "minItems": 2,
    },
    "tuple and more": {"type": "array", "prefixItems": [{"type": "null"}], "items": {"type": "integer"}},
    "arrays in arrays": {
        "type": "array",
        "items": {
            "type": "array",
            "items": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
            "maxItems": 2,
        },
        "maxItems": 2,
    },
    "any of": {
        "anyOf": [
            {"type": "string", "maxLength": 3},
            {"type": "integer"},
            _variant("cat", "lives", {"type": "integer"}),
        ]
    },
    "one of, told apart": {
        "oneOf": [
            _variant("cat", "lives", {"type": "integer"}),
            _variant("dog", "good", {"type": "boolean"}),
        ]
    },
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"properties": {"b": {"type": "string", "maxLength": 5}}, "required": ["b"]},
        ]
    },
    "recursive": {"$defs": {"n": _NODE}, "$ref": "#/$defs/n"},
    "older definitions": {
        "definitions": {"a": {"type": "integer"}},
        "type": "object",
        "properties": {"x": {"$ref": "#/definitions/a"}},
        "required": ["x"],
    },
    "anchor": {"$defs": {"a": {"$anchor": "aa", "type": "integer"}}, "$ref": "#aa"},
}

UNSUPPORTED: dict[str, dict[str, Any]] = {
    "uniqueItems": {"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True},
    "contains": {"type": "array", "contains": {"const": 5}},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^a"}},
    "not": {"not": {"type": "string"}},
    "if": {"if": {"type": "string"}, "then": {"maxLength": 2}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "$dynamicAnchor": {"$dynamicAnchor": "node", "type": "object"},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "strin": {"type": "strin"},
    "-1": {"type": "string", "minLength": -1},
    "minLength (5)": {"type": "string", "minLength": 5, "maxLength": 2},
    "minimum (5)": {"type": "integer", "minimum": 5, "maximum": 2},
    "anyOf is empty": {"enum": []},
    "incompatible types": {"allOf": [{"type": "string"}, {"type": "integer"}]},
    "Unknown format: regex": {"type": "string", "format": "regex"},
    "http://localhost:1/x.json": {"$ref": "http://localhost:1/x.json"},
    "file:///etc/passwd": {"$ref": "file:///etc/passwd"},
    "/$defs/nothing": {"$ref": "#/$defs/nothing"},
}
"""What the refusal names -> a schema that cannot be held to, or that no value can match."""
