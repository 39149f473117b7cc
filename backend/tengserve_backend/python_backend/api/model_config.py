"""The configuration that `auto_complete_config` completes, with python_backend's complaints about conflicts."""

from __future__ import annotations

import json
from typing import Any


class ModelConfig:
    """See the module.

    Args:
        model_config: the configuration so far, as JSON text.
    """

    def __init__(self, model_config: str) -> None:
        self._model_config: dict[str, Any] = json.loads(model_config)

    def as_dict(self) -> dict[str, Any]:
        """The configuration, to read."""
        return self._model_config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Raises ValueError when the configuration has a larger one."""
        given = self._model_config["max_batch_size"]
        if given > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {given}, but in auto-complete-config function for model "
                f"'{self._name}' specified max_batch_size {max_batch_size}"
            )
        self._model_config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Raises ValueError when the configuration has another scheduler."""
        for scheduler in ("sequence_batching", "ensemble_scheduling"):
            if scheduler in self._model_config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{scheduler}', but auto-complete-config function "
                    f"for model '{self._name}' tries to set scheduling_choice as 'dynamic_batching'"
                )
        self._model_config.setdefault("dynamic_batching", {})

    def add_input(self, input: dict[str, Any]) -> None:
        """Raises ValueError when it lacks a property, has one too many, or contradicts the configuration."""
        self._add(
            "input", input, ("name", "data_type", "dims", "optional"), "'name', 'data_type', 'dims' and 'optional'"
        )

    def add_output(self, output: dict[str, Any]) -> None:
        """Raises ValueError when it lacks a property, has one too many, or contradicts the configuration."""
        self._add("output", output, ("name", "data_type", "dims"), "'name', 'data_type' and 'dims'")

    def set_model_transaction_policy(self, transaction_policy_dict: dict[str, Any]) -> None:
        """Raises ValueError for another key than 'decoupled', and when the configuration says otherwise."""
        if any(key != "decoupled" for key in transaction_policy_dict):
            raise ValueError(
                f"model transaction property in auto-complete-config function for model '{self._name}' contains "
                f"property other than 'decoupled'."
            )
        policy = self._model_config.setdefault("model_transaction_policy", {})
        if "decoupled" not in transaction_policy_dict:
            return
        wanted = transaction_policy_dict["decoupled"]
        if "decoupled" in policy and policy["decoupled"] != wanted:
            raise ValueError(
                f"trying to change decoupled property in auto-complete-config for model '{self._name}', which is "
                f"already set to '{policy['decoupled']}'."
            )
        policy["decoupled"] = wanted

    @property
    def _name(self) -> str:
        return str(self._model_config["name"])

    def _add(self, kind: str, tensor: dict[str, Any], known: tuple[str, ...], listed: str) -> None:
        where = f"in auto-complete-config function for model '{self._name}'"
        if "name" not in tensor:
            raise ValueError(f"{kind} {where} is missing 'name' property.")
        name = tensor["name"]
        if any(key not in known for key in tensor):
            raise ValueError(f"{kind} '{name}' {where} contains property other than {listed}.")
        for key in ("data_type", "dims"):
            if key not in tensor:
                raise ValueError(f"{kind} '{name}' {where} is missing '{key}' property.")
        for given in self._model_config[kind]:
            if given["name"] == name:
                self._merge(kind, given, tensor)
                return
        self._model_config[kind].append(tensor)

    def _merge(self, kind: str, given: dict[str, Any], tensor: dict[str, Any]) -> None:
        model, name = self._name, tensor["name"]
        if given["data_type"] not in ("TYPE_INVALID", tensor["data_type"]):
            raise ValueError(
                f"unable to load model '{model}', configuration expects datatype {given['data_type']} for {kind} "
                f"'{name}', model provides {tensor['data_type']}"
            )
        for key in ("dims", "optional"):
            if key not in tensor or key not in given:
                continue
            if (given[key] or key == "optional") and given[key] != tensor[key]:
                raise ValueError(
                    f"model '{model}', tensor '{name}': the model expects {key} {tensor[key]} but the model "
                    f"configuration specifies {key} {given[key]}"
                )
        given.update(tensor)
