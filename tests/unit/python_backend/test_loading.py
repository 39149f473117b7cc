"""From a folder to a model: imports that do not meet, the completed configuration, and what goes wrong."""

from __future__ import annotations

import gc
import sys
import threading
from pathlib import Path

import pytest
from prometheus_client import REGISTRY, generate_latest

from support.python_models import IO, ask, first_output, loaded, model, write_model
from tengserve_backend.errors import ConfigurationError, ShuttingDownError
from tengserve_backend.python_backend import load_python_model
from tengserve_backend.repository.scan import scan_repository

USES_HELPERS = """
    import numpy as np
    import triton_python_backend_utils as pb_utils
    import helper
    import package.part
    from package import other
    from common import COMMON

    class TritonPythonModel:
        def execute(self, requests):
            import late
            values = [helper.VALUE, package.part.VALUE, other.VALUE, COMMON, late.VALUE]
            made = pb_utils.Tensor("OUT", np.array(values, np.float32))
            return [pb_utils.InferenceResponse([made]) for _ in requests]
"""


def helpers(base: int) -> dict[str, str]:
    return {
        "1/helper.py": f"from package.part import VALUE as part\nVALUE = {base} + part - {base}.5 + 0.5",
        "1/package/__init__.py": "",
        "1/package/part.py": f"VALUE = {base}",
        "1/package/other.py": "from . import part\nVALUE = part.VALUE + 1",
        "common.py": f"COMMON = {base} + 2",
        "1/late.py": f"VALUE = {base} + 3",
    }


async def test_modules_of_the_same_name_do_not_meet(tmp_path: Path) -> None:
    before, path = set(sys.modules), list(sys.path)
    write_model(tmp_path, "a", USES_HELPERS, files=helpers(10))
    write_model(tmp_path, "b", USES_HELPERS, files=helpers(20))
    with loaded(tmp_path) as models:
        assert await first_output(models["a"]) == [10, 10, 11, 12, 13]
        assert await first_output(models["b"]) == [20, 20, 21, 22, 23]
        added = {name.partition(".")[0] for name in set(sys.modules) - before}
        assert not added & {"helper", "package", "common", "late", "model"}
        assert sys.path == path
    assert not [name for name in sys.modules if name.startswith("_tengserve_model_")]


async def test_each_instance_has_its_own_modules(tmp_path: Path) -> None:
    code = """
        import threading
        import numpy as np
        import triton_python_backend_utils as pb_utils

        seen = []
        both = None

        class TritonPythonModel:
            def execute(self, requests):
                seen.append(1)
                made = pb_utils.Tensor("OUT", np.array([len(seen)], np.float32))
                return [pb_utils.InferenceResponse([made]) for _ in requests]
    """
    with model(tmp_path, code, IO + "sequence_batching {} instance_group [{ count: 2 }]") as m:
        from tengserve_backend.inference import SequenceFlags

        counts = [await first_output(m, ask(sequence=SequenceFlags(key, start=True))) for key in (1, 2)]
    assert counts == [[1], [1]]


async def test_an_installed_package_finds_the_api_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "tengserve_test_library.py").write_text(
        "import triton_python_backend_utils as pb_utils\ndef where():\n    return pb_utils.get_model_dir()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    code = """
        import numpy as np
        import tengserve_test_library
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            def execute(self, requests):
                same = tengserve_test_library.where() == pb_utils.get_model_dir()
                return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([same]))]) for _ in requests]
    """
    with model(tmp_path / "models", code) as m:
        assert await first_output(m) == [True]
    sys.modules.pop("tengserve_test_library", None)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("def", "model.py failed: SyntaxError: "),
        ("import nothing_like_this", "model.py failed: ModuleNotFoundError: No module named 'nothing_like_this'"),
        ("x = 1", "model.py has no class TritonPythonModel"),
        ("class TritonPythonModel: pass", "model.py: TritonPythonModel has no method execute"),
        (
            "class TritonPythonModel:\n    def execute(self, requests): pass\n"
            "    def initialize(self, args): raise RuntimeError('no weights in /srv/models/x')",
            "initialize failed: RuntimeError: no weights in ...",
        ),
    ],
)
def test_a_model_that_cannot_start_says_why(tmp_path: Path, code: str, says: str) -> None:
    before = threading.active_count()
    with pytest.raises(ConfigurationError) as caught, model(tmp_path, code):
        pass
    assert says in caught.value.message
    assert str(tmp_path) not in caught.value.message
    assert threading.active_count() == before


def test_a_load_ends_early_when_its_progress_says_so(tmp_path: Path) -> None:
    code = """
        import os
        import time
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            def initialize(self, args):
                while not os.path.exists(pb_utils.get_model_dir() + "/go"):
                    time.sleep(0.001)

            def execute(self, requests):
                pass
    """
    write_model(tmp_path, "m", code)
    (source,) = scan_repository(tmp_path)

    def report(stage: str, fraction: float) -> None:
        raise ShuttingDownError("stopping")

    try:
        with pytest.raises(ShuttingDownError):
            load_python_model(source, report)
    finally:
        (tmp_path / "m" / "1" / "go").touch()
    for thread in threading.enumerate():
        if thread.name == "model m_0_0":
            thread.join(30)


COMPLETES = """
    import numpy as np
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        @staticmethod
        def auto_complete_config(config):
            {body}
            return config

        def execute(self, requests):
            made = pb_utils.Tensor("OUT", np.array([len(requests)], np.float32))
            return [pb_utils.InferenceResponse([made]) for _ in requests]
"""


async def test_the_model_completes_its_configuration(tmp_path: Path) -> None:
    body = (
        'config.add_input({"name": "IN", "data_type": "TYPE_FP32", "dims": [-1]}); '
        'config.add_output({"name": "OUT", "data_type": "TYPE_FP32", "dims": [-1]}); '
        "config.set_max_batch_size(4); config.set_dynamic_batching(); "
        'config.set_model_transaction_policy({"decoupled": False})'
    )
    with model(tmp_path, COMPLETES.format(body=body), 'backend: "python"') as m:
        assert m.max_batch_size == 4
        assert m.inputs[0].shape == (-1, -1)
        assert m.config["dynamic_batching"]["preferred_batch_size"] == []
        assert m.config["input"][0]["optional"] is False


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("config.set_max_batch_size(1)", "ValueError: configuration specified max_batch_size 2, but in auto-complete"),
        (
            'config.add_input({"name": "IN", "data_type": "TYPE_INT32", "dims": [-1]})',
            "unable to load model 'm', configuration expects datatype TYPE_FP32 for input 'IN', model provides "
            "TYPE_INT32",
        ),
        (
            'config.add_output({"name": "OUT", "data_type": "TYPE_FP32", "dims": [3]})',
            "model 'm', tensor 'OUT': the model expects dims [3] but the model configuration specifies dims [-1]",
        ),
        ('config.add_input({"name": "B", "dims": [1]})', "is missing 'data_type' property."),
        (
            'config.add_output({"name": "B", "data_type": "TYPE_FP32", "dims": [1], "x": 1})',
            "contains property other than 'name', 'data_type' and 'dims'.",
        ),
        ('config.set_model_transaction_policy({"other": 1})', "contains property other than 'decoupled'."),
        (
            'config.set_model_transaction_policy({"decoupled": True})',
            "trying to change decoupled property in auto-complete-config for model 'm', which is already set to "
            "'False'.",
        ),
        ("config = 3", "auto_complete_config function in model 'm' must return a valid pb.ModelConfig object."),
        (
            'config.add_input({"name": "B", "data_type": "TYPE_NONE", "dims": [1]})',
            "what auto_complete_config made breaks the schema of config.pbtxt",
        ),
    ],
)
def test_a_completion_that_contradicts_is_refused(tmp_path: Path, body: str, says: str) -> None:
    config = IO + "max_batch_size: 2 model_transaction_policy {}"
    with pytest.raises(ConfigurationError) as caught, model(tmp_path, COMPLETES.format(body=body), config):
        pass
    assert says in caught.value.message


READY = """
    import os
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            pass

        {define} is_ready(self):
            {body}
"""


@pytest.mark.parametrize(
    ("define", "body", "ready"),
    [
        ("def", "return True", True),
        ("def", "return False", False),
        ("async def", "return True", True),
        ("def", "raise ValueError('x')", False),
        ("def", "return 1", False),
    ],
)
async def test_is_ready_is_the_model_s_own(tmp_path: Path, define: str, body: str, ready: bool) -> None:
    with model(tmp_path, READY.format(define=define, body=body)) as m:
        assert await m.is_ready() is ready
        await m.drain(30)
        assert not await m.is_ready()


METRICS = """
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def initialize(self, args):
            family = pb_utils.MetricFamily("test_requests_total", "Requests.", pb_utils.MetricFamily.COUNTER)
            self.count = family.Metric(labels={"who": "me"})
            other = pb_utils.MetricFamily("test_plain", "", pb_utils.MetricFamily.COUNTER)
            other.Metric(labels={"a": "b"}).increment(3)
            sizes = pb_utils.MetricFamily(name="test_sizes", description="", kind=pb_utils.MetricFamily.HISTOGRAM)
            self.sizes = sizes.Metric(labels={}, buckets=[1.0, 2.0])

        def execute(self, requests):
            import numpy as np
            self.count.increment(2)
            self.sizes.observe(1.5)
            pb_utils.Logger.log_warn("counted")
            wrong = []
            for call in (lambda: self.count.set(1), lambda: self.count.increment(-1), lambda: self.sizes.value(),
                         lambda: pb_utils.MetricFamily("no name", "", pb_utils.MetricFamily.GAUGE),
                         lambda: pb_utils.MetricFamily("python_info", "", pb_utils.MetricFamily.GAUGE)):
                try:
                    call()
                except pb_utils.TritonModelException:
                    wrong.append(1)
            made = pb_utils.Tensor("OUT", np.array([self.count.value(), len(wrong)], np.float32))
            return [pb_utils.InferenceResponse([made]) for _ in requests]
"""


async def test_a_model_s_metrics_are_on_the_page_while_it_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path, "a", METRICS)
    write_model(tmp_path, "b", METRICS)
    with loaded(tmp_path) as models:
        assert await first_output(models["a"]) == [2, 5]
        assert await first_output(models["b"]) == [4, 5]  # They share the family, as Triton's models do.
        page = generate_latest(REGISTRY).decode()
        assert 'test_requests_total{who="me"} 4.0' in page
        assert 'test_plain{a="b"} 6.0' in page
        assert 'test_sizes_bucket{le="2"} 2.0' in page
        assert page.count("# TYPE test_requests_total counter") == 1
        models["a"].stop()
        assert "test_requests_total" in generate_latest(REGISTRY).decode()
    assert "test_requests_total" not in generate_latest(REGISTRY).decode()
    assert "model a: counted" in caplog.text


async def test_what_a_model_holds_goes_when_it_is_stopped(tmp_path: Path) -> None:
    code = """
        import pathlib
        import numpy as np
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            def initialize(self, args):
                self.left = pathlib.Path(args["model_repository"], "left")

            def execute(self, requests):
                return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.ones(1, np.float32))]) for _ in requests]

            def __del__(self):
                self.left.touch()
    """
    # As for a model that was there when a large module was imported and all was frozen: no collection finds it.
    gc.disable()
    try:
        with model(tmp_path, code) as m:
            assert await first_output(m) == [1]
            assert not (tmp_path / "m" / "left").exists()
        assert (tmp_path / "m" / "left").exists()
    finally:
        gc.enable()
