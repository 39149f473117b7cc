"""A simulated NPU: the real torch_npu on a stand-in for Ascend's runtime, with kernels that compute on the host.

`runtime/` holds the stand-in: devices, memory, streams, copies, errors. This package is what makes its operators work:

- `hook`: turns the simulation on in a process, before torch is imported;
- `kernels`: one kernel for each operator that the wheel has a kernel for, registered for all threads;
- `state`: the knobs and counters of the runtime, of this process or of another one;
- `log`: which operators ran, and which of them the wheel has no kernel for.
"""
