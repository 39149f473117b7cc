// The operators; register.cpp says their schemas and docs what they compute. Each checks all that it is given.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace tengserve {

void paged_write(const at::Tensor& key, const at::Tensor& value, const at::Tensor& keys, const at::Tensor& values,
                 const at::Tensor& slots, int64_t block_size);

at::Tensor paged_attention(const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values,
                           const at::Tensor& block_table, at::IntArrayRef query_ends, at::IntArrayRef contexts,
                           int64_t block_size, double scale, std::optional<int64_t> window,
                           std::optional<int64_t> chunk, std::optional<double> softcap,
                           const std::optional<at::Tensor>& sinks);

at::Tensor pack_linear(const at::Tensor& weight);

at::Tensor linear(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                  int64_t in_features, int64_t out_features);

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);

at::Tensor silu_mul(const at::Tensor& gate_up);

std::tuple<at::Tensor, at::Tensor> rotary(const at::Tensor& query, const at::Tensor& key, const at::Tensor& cos,
                                          const at::Tensor& sin);

}  // namespace tengserve
