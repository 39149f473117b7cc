// The operators, torch.ops.tengserve_cpu.*. Tensors are dense, on the CPU, float32 or bfloat16, and of one type in a
// call; each operator checks all that it is given and raises c10::Error. A row of a result never depends on the other
// rows.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace tengserve {

// Stores tokens: key [T, heads, key_dim] and value [T, heads, value_dim], of any strides but the last, go to slots,
// int64 [T]. keys and values are a layer's contiguous [slots, heads, dim]; only these operators know the order inside
// a block.
void paged_write(const at::Tensor& key, const at::Tensor& value, const at::Tensor& keys, const at::Tensor& values,
                 const at::Tensor& slots, int64_t block_size);

// Causal attention: query [query heads, T, key_dim] -> [T, query heads, value_dim]. Sequence s has the rows up to
// query_ends[s]; they are the last of its contexts[s] tokens, which lie in the blocks of row s of block_table, int32. A
// query sees `window` keys, itself included, and of those the ones in its own chunk of `chunk` positions. Scores are
// softcap * tanh(score / softcap); sinks, [query heads], is one more score a head that no value belongs to.
at::Tensor paged_attention(const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values,
                           const at::Tensor& block_table, at::IntArrayRef query_ends, at::IntArrayRef contexts,
                           int64_t block_size, double scale, std::optional<int64_t> window,
                           std::optional<int64_t> chunk, std::optional<double> softcap,
                           const std::optional<at::Tensor>& sinks);

// A weight [out, in] in the order in which `linear` reads it, see WeightKind.
at::Tensor pack_linear(const at::Tensor& weight);

// Likewise a weight of integers, int8 [out, in], times scales, bfloat16 [out, groups of 32 inputs].
at::Tensor pack_linear_int8(const at::Tensor& integers, const at::Tensor& scales);

// Likewise of integers from 0 to 15, uint8 [out, in], times scales, and minimums added to that, both bfloat16
// [out, groups].
at::Tensor pack_linear_int4(const at::Tensor& integers, const at::Tensor& scales, const at::Tensor& minimums);

// x [..., in_features] -> [..., out_features]; bias [out_features].
at::Tensor linear(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                  int64_t in_features, int64_t out_features);
at::Tensor linear_int8(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                       int64_t in_features, int64_t out_features);
at::Tensor linear_int4(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                       int64_t in_features, int64_t out_features);

// x / sqrt(mean(x^2) + eps) over the last dimension, rounded to x's type, times weight.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);

// [..., 2 * n] -> [..., n]: silu of the first half, rounded, times the second.
at::Tensor silu_mul(const at::Tensor& gate_up);

// Rotated query and key, [1, heads, T, dim] of any strides but the last; cos and sin [1, T, dim]. Halves are rotated:
// of x it is x * cos + (-x[dim / 2:], x[:dim / 2]) * sin, each product and the sum rounded. The results lie by token
// in memory.
std::tuple<at::Tensor, at::Tensor> rotary(const at::Tensor& query, const at::Tensor& key, const at::Tensor& cos,
                                          const at::Tensor& sin);

// [R, size] -> int64 [R]: where the first of a row's largest is; -1 where that is not finite, or one is a NaN.
at::Tensor first_maxima(const at::Tensor& x);

}  // namespace tengserve
