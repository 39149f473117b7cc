// The operators as torch sees them: torch.ops.tengserve_cpu.*
#include <torch/library.h>

#include <string>

#include "decoder.h"
#include "isa.h"
#include "operators.h"

TORCH_LIBRARY(tengserve_cpu, m) {
  m.def(
      "paged_write(Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values, Tensor slots, "
      "int block_size) -> ()");
  m.def(
      "paged_attention(Tensor query, Tensor keys, Tensor values, Tensor block_table, int[] query_ends, int[] contexts, "
      "int block_size, float scale, int? window, int? chunk, float? softcap, Tensor? sinks) -> Tensor");
  m.def("pack_linear(Tensor weight) -> Tensor");
  m.def("pack_linear_int8(Tensor integers, Tensor scales) -> Tensor");
  m.def("pack_linear_int4(Tensor integers, Tensor scales, Tensor minimums) -> Tensor");
  m.def("linear(Tensor x, Tensor packed, Tensor? bias, int in_features, int out_features) -> Tensor");
  m.def("linear_int8(Tensor x, Tensor packed, Tensor? bias, int in_features, int out_features) -> Tensor");
  m.def("linear_int4(Tensor x, Tensor packed, Tensor? bias, int in_features, int out_features) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("silu_mul(Tensor gate_up) -> Tensor");
  m.def("rotary(Tensor query, Tensor key, Tensor cos, Tensor sin) -> (Tensor, Tensor)");
  m.def("first_maxima(Tensor x) -> Tensor");
  m.class_<tengserve::Decoder>("Decoder")
      .def(torch::init<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>())
      .def("add_layer", &tengserve::Decoder::add_layer)
      .def("run", &tengserve::Decoder::run);
  // It has no tensor to choose a kernel by.
  m.def("isa() -> str", [] { return std::string(tengserve::level().name); });
}

TORCH_LIBRARY_IMPL(tengserve_cpu, CPU, m) {
  m.impl("paged_write", tengserve::paged_write);
  m.impl("paged_attention", tengserve::paged_attention);
  m.impl("pack_linear", tengserve::pack_linear);
  m.impl("pack_linear_int8", tengserve::pack_linear_int8);
  m.impl("pack_linear_int4", tengserve::pack_linear_int4);
  m.impl("linear", tengserve::linear);
  m.impl("linear_int8", tengserve::linear_int8);
  m.impl("linear_int4", tengserve::linear_int4);
  m.impl("rms_norm", tengserve::rms_norm);
  m.impl("silu_mul", tengserve::silu_mul);
  m.impl("rotary", tengserve::rotary);
  m.impl("first_maxima", tengserve::first_maxima);
}
