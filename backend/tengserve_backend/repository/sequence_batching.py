"""What the `sequence_batching` of a python model may say."""

from __future__ import annotations

from typing import Any, Final

from tengserve_backend.errors import ConfigurationError, shown

MAX_CANDIDATE_SEQUENCES: Final = 10_000
"""Of one instance."""

_FLAGS: Final = ("CONTROL_SEQUENCE_START", "CONTROL_SEQUENCE_END", "CONTROL_SEQUENCE_READY")
_CORRELATION_ID: Final = "CONTROL_SEQUENCE_CORRID"
_VALUES: Final = ("int32_false_true", "fp32_false_true", "bool_false_true")
_CORRELATION_ID_TYPES: Final = ("TYPE_UINT64", "TYPE_INT64", "TYPE_UINT32", "TYPE_INT32", "TYPE_STRING")


def check_sequence_batching(config: Any, file: str) -> None:
    """Check what the schema does not; nothing for a model without sequences.

    Raises:
        ConfigurationError: the rule that is broken, and what is given.
    """
    if not config.HasField("sequence_batching"):
        return
    sequences = config.sequence_batching
    if sequences.state:
        raise _wrong("state is not supported: a python model keeps its state itself, by correlation_id()", file)
    if sequences.iterative_sequence:
        raise _wrong("iterative_sequence is not supported: a request cannot be rescheduled", file)
    inputs = {tensor.name for tensor in config.input}
    kinds: set[str] = set()
    for tensor in sequences.control_input:
        if not tensor.name or tensor.name in inputs:
            raise _wrong(f'control_input "{shown(tensor.name)}" needs a name of its own', file)
        inputs.add(tensor.name)
        if len(tensor.control) != 1:
            raise _wrong(
                f'control_input "{shown(tensor.name)}" must have exactly 1 control, not {len(tensor.control)}', file
            )
        kind = _check_control(tensor.name, tensor.control[0], file)
        if kind in kinds:
            raise _wrong(f"{kind} must have one tensor, and has more", file)
        kinds.add(kind)
    if not 0 <= sequences.oldest.max_candidate_sequences <= MAX_CANDIDATE_SEQUENCES:
        raise _wrong(
            f"max_candidate_sequences must be in [0, {MAX_CANDIDATE_SEQUENCES}], not "
            f"{sequences.oldest.max_candidate_sequences}",
            file,
        )
    if not sequences.oldest.max_candidate_sequences and config.max_batch_size > MAX_CANDIDATE_SEQUENCES:
        raise _wrong(
            f"max_batch_size must be at most {MAX_CANDIDATE_SEQUENCES}, as it is the number of sequences of an "
            f"instance here, not {config.max_batch_size}",
            file,
        )
    if not 0 <= sequences.direct.minimum_slot_utilization <= 1:
        raise _wrong(
            f"minimum_slot_utilization must be in [0, 1], not {sequences.direct.minimum_slot_utilization}", file
        )


def _check_control(name: str, control: Any, file: str) -> str:
    """The kind of a control that is right."""
    kind = _enum_name(control, "kind")
    where = f'control_input "{shown(name)}"'
    given = [field for field in _VALUES if len(getattr(control, field))]
    if kind == _CORRELATION_ID:
        data_type = _enum_name(control, "data_type")
        if given or data_type not in _CORRELATION_ID_TYPES:
            raise _wrong(
                f"{where}: {kind} needs a data_type of {', '.join(_CORRELATION_ID_TYPES)} and no values, not "
                f"{data_type}",
                file,
            )
        return kind
    if kind not in _FLAGS:
        raise _wrong(f"{where}: a control must be one of {', '.join((*_FLAGS, _CORRELATION_ID))}, not {kind}", file)
    if len(given) != 1 or len(getattr(control, given[0])) != 2:
        raise _wrong(f"{where}: {kind} needs two values in one of {', '.join(_VALUES)}", file)
    return kind


def _enum_name(message: Any, field: str) -> str:
    """The name of an enum's value; a number that the schema has not, in text."""
    number = getattr(message, field)
    named = message.DESCRIPTOR.fields_by_name[field].enum_type.values_by_number.get(number)
    return str(number) if named is None else str(named.name)


def _wrong(text: str, file: str) -> ConfigurationError:
    return ConfigurationError(f"sequence_batching: {text}", file=file)
