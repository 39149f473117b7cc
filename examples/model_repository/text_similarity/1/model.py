"""How alike two texts are, from 0 to 1: the share of the runs of letters that both have."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """One instance of the model. The server makes it, and calls its methods on one thread."""

    def initialize(self, args):
        """Called once, before the first request: read settings, load weights."""
        config = json.loads(args["model_config"])
        self.letters = int(config["parameters"]["letters"]["string_value"])
        # Appears on the server's page of metrics.
        family = pb_utils.MetricFamily(
            name="text_similarity_pairs_total", description="Pairs compared.", kind=pb_utils.MetricFamily.COUNTER
        )
        self.pairs = family.Metric(labels={"version": args["model_version"]})
        pb_utils.Logger.log_info(f"comparing runs of {self.letters} letters")

    def execute(self, requests):
        """Called with the requests of one batch; returns a response for each, in their order."""
        return [self.answer(request) for request in requests]

    def finalize(self):
        """Called once, when the model is unloaded."""
        pb_utils.Logger.log_info("text_similarity is gone")

    def answer(self, request):
        """The response to one request."""
        first = pb_utils.get_input_tensor_by_name(request, "TEXT_A").as_numpy()
        second = pb_utils.get_input_tensor_by_name(request, "TEXT_B").as_numpy()
        try:
            # Text arrives as arrays of bytes.
            pairs = [(a.decode("utf-8"), b.decode("utf-8")) for a, b in zip(first.ravel(), second.ravel(), strict=True)]
        except UnicodeDecodeError:
            error = pb_utils.TritonError("the texts must be UTF-8", pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse(error=error)
        self.pairs.increment(len(pairs))
        made = np.array([self.similarity(a, b) for a, b in pairs], dtype=np.float32).reshape(-1, 1)
        return pb_utils.InferenceResponse([pb_utils.Tensor("SIMILARITY", made)])

    def similarity(self, first, second):
        """The share of runs that both texts have, of those that either has."""
        a, b = self.runs(first), self.runs(second)
        return len(a & b) / len(a | b) if a | b else 1.0

    def runs(self, text):
        """Every run of so many letters in a text."""
        return {text[at : at + self.letters] for at in range(len(text) - self.letters + 1)}
