"""Words an error of pydantic as `problem; fix`. Pure."""

from collections.abc import Mapping
from typing import Any

_NUMBER = ("not a number", "give digits, such as 0.5")
_WHOLE_NUMBER = ("not a whole number", "give digits, such as 8")
_FLAG = ("not a flag", "give true or false")
_RANGE = "out of range"
_OF_VALUES = {
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float", "int_parsing_size"), _WHOLE_NUMBER),
    **dict.fromkeys(("float_parsing", "float_type", "finite_number"), _NUMBER),
    **dict.fromkeys(("bool_parsing", "bool_type"), _FLAG),
    "greater_than": (_RANGE, "give more than {gt:.15g}"),
    "greater_than_equal": (_RANGE, "give {ge:.15g} or more"),
    "less_than": (_RANGE, "give less than {lt:.15g}"),
    "less_than_equal": (_RANGE, "give {le:.15g} or less"),
    "literal_error": ("unknown", "give {expected}"),
    "enum": ("unknown", "give {expected}"),
    "string_type": ("not a text", "give a text"),
    "tuple_type": ("not a list", "give a list"),
    "frozen_set_type": ("not a list", "give a list"),
    "string_too_short": ("too short", "give {min_length} or more characters"),
    "too_short": ("too short", "give {min_length} or more entries"),
}
_OF_DOCUMENTS = {
    "missing": ("missing", "add it"),
    "extra_forbidden": ("unknown", "remove it"),
    "json_invalid": ("not JSON ({error})", "correct the text there"),
    "model_type": ("not an object", "give a JSON object"),
}
"""Errors that quote no value: there is none, or it is the whole document."""


def problem_and_fix(fault: Mapping[str, Any], forms: Mapping[str, str], *, with_value: bool = True) -> str:
    """Return an entry of `ValidationError.errors()` as `problem; fix`, without its field.

    Args:
        fault: The entry, with its context.
        forms: The valid form in words, by regular expression.
        with_value: Quote the wrong value, which must not be secret.
    """
    context = fault.get("ctx", {})
    if fault["type"] == "string_pattern_mismatch":
        problem, fix = "not of the right form", f"give {forms[context['pattern']]}"
    elif words := _OF_DOCUMENTS.get(fault["type"]):
        return "; ".join(words).format(**context)
    elif words := _OF_VALUES.get(fault["type"]):
        problem, fix = words[0], words[1].format(**context)
    else:
        message: str = fault["msg"].removeprefix("Value error, ")
        value = repr(fault["input"]) if with_value and not isinstance(fault["input"], dict) else ""
        return message if value in message else f"{message}, got {value}"
    return f"{fault['input']!r} is {problem}; {fix}" if with_value else f"{problem}; {fix}"
