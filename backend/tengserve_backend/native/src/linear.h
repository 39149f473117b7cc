// Linear layers for callers that have threads of their own: rows of x are prepared once, then any thread computes any
// panels of the weight.
#pragma once

#include <ATen/core/Tensor.h>

#include "kernels.h"

namespace tengserve {

// A packed tensor as the kernels see it; the tensor must outlive it. Raises c10::Error where it is no weight
// [out, in] of this kind that is multiplied in this type.
PackedWeight packed_weight(const at::Tensor& packed, WeightKind kind, int64_t in, int64_t out, at::ScalarType dtype);

inline int64_t panel_count(const PackedWeight& weight) {
  return (weight.out + kPanelColumns - 1) / kPanelColumns;
}

// Bytes of rows of x as linear_panels reads them.
template <typename T>
int64_t prepared_bytes(const PackedWeight& weight, int64_t rows);

// Puts row `row` of x, `in` numbers, in its place among prepared ones, which begin on a cache line. By any thread, in
// any order.
template <typename T>
void prepare_row(const PackedWeight& weight, const T* x, int64_t in, int64_t row, void* prepared);

// The same for numbers [column, column + count) of the row alone; those that fill up a row are zeros already.
template <typename T>
void prepare_columns(const PackedWeight& weight, const T* x, int64_t column, int64_t count, int64_t row,
                     void* prepared);

// Prepared rows times panels [panel, end_panel) of a weight of any kind. Rows of out are out_stride apart and begin at
// the weight's column 0. A row has the same bits whatever the other rows and whoever computes which panels.
template <typename T>
void linear_panels(const PackedWeight& weight, const void* prepared, int64_t rows, int64_t panel, int64_t end_panel,
                   const T* bias, T* out, int64_t out_stride);

}  // namespace tengserve
