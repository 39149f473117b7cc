// Rows times one panel of a packed weight, see kernels.h. A panel is read once a tile of rows, front to back.
#pragma once

#include "kernels.h"

namespace tengserve {
namespace {

// Bytes of the panel to be ahead of the multiplications: a few hundred cycles of them.
constexpr int64_t kAhead = 4096;

// A step of the loop over `in`: one dimension in float32, a pair of them in bfloat16. `step` points at its 32 columns.
template <int R, int kVecs>
inline void multiply_step(const float* const (&x)[R], int64_t k, const float* step, Vec (&out)[R][kVecs]) {
  Vec w[kVecs];
  for (int c = 0; c < kVecs; ++c) w[c] = load(step + c * kLanes);
  for (int r = 0; r < R; ++r) {
    const Vec a = broadcast(x[r][k]);
    for (int c = 0; c < kVecs; ++c) out[r][c] = fma(a, w[c], out[r][c]);
  }
}

#ifdef __AVX512BF16__
template <int R, int kVecs>
inline void multiply_step(const Bf16* const (&x)[R], int64_t k, const Bf16* step, Vec (&out)[R][kVecs]) {
  for (int r = 0; r < R; ++r) {
    uint32_t pair;
    std::memcpy(&pair, x[r] + k, sizeof pair);
    for (int c = 0; c < kVecs; ++c) out[r][c] = dot_pairs(out[r][c], step + c * 2 * kLanes, pair);
  }
}
using Bf16Input = Bf16;
#else
template <int R, int kVecs>
inline void multiply_step(const float* const (&x)[R], int64_t k, const Bf16* step, Vec (&out)[R][kVecs]) {
  for (int c = 0; c < kVecs; ++c) {
    Vec even, odd;
    load_pairs(step + c * 2 * kLanes, even, odd);
    for (int r = 0; r < R; ++r) {
      out[r][c] = fma(broadcast(x[r][k]), even, out[r][c]);
      out[r][c] = fma(broadcast(x[r][k + 1]), odd, out[r][c]);
    }
  }
}
using Bf16Input = float;
#endif

template <typename T>
struct LinearTypes;
template <>
struct LinearTypes<float> {
  using Input = float;
  static constexpr int64_t kStep = 1;
};
template <>
struct LinearTypes<Bf16> {
  using Input = Bf16Input;
  static constexpr int64_t kStep = 2;
};

// One row's results from `column` on: the sums and the bias, as many of 16 as there are columns.
template <typename T>
inline void store_sums(const LinearTask<T>& task, int64_t row, int64_t column, Vec sums) {
  T* to = task.out + row * task.out_stride + column;
  const int64_t rest = task.columns - column;
  if (rest >= kLanes) {
    store(to, task.bias ? sums + load(task.bias + column) : sums);
  } else {
    const int width = static_cast<int>(rest);
    store_first(to, task.bias ? sums + load_first(task.bias + column, width) : sums, width);
  }
}

// R rows times kVecs * 16 columns from column0 on.
template <typename T, int R, int kVecs>
void linear_tile(const LinearTask<T>& task, int64_t row0, int64_t column0) {
  using Input = typename LinearTypes<T>::Input;
  constexpr int64_t kStep = LinearTypes<T>::kStep;
  const Input* x[R];
  for (int r = 0; r < R; ++r) x[r] = static_cast<const Input*>(task.x) + (row0 + r) * task.in;
  Vec out[R][kVecs];
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < kVecs; ++c) out[r][c] = zeros();
  }
  const T* step = task.panel + column0 * kStep;
  for (int64_t k = 0; k < task.in; k += kStep, step += kStep * kPanelColumns) {
    for (int c = 0; c < kVecs; ++c) {
      __builtin_prefetch(reinterpret_cast<const char*>(step + c * kStep * kLanes) + kAhead);
    }
    multiply_step<R, kVecs>(x, k, step, out);
  }
  for (int c = 0; c < kVecs && column0 + c * kLanes < task.columns; ++c) {
    for (int r = 0; r < R; ++r) store_sums(task, row0 + r, column0 + c * kLanes, out[r][c]);
  }
}

template <typename T, int R = kLinearRows>
void linear_rows(const LinearTask<T>& task, int64_t row0, int rows) {
  if constexpr (R > 1) {
    if (rows < R) return linear_rows<T, R - 1>(task, row0, rows);
  }
  for (int64_t column = 0; column < task.columns; column += kLinearVecs * kLanes) {
    linear_tile<T, R, kLinearVecs>(task, row0, column);
  }
}

template <typename T>
void linear(const LinearTask<T>& task) {
  // Tiles of nearly equal rows: a last one of a single row would cost nearly what a full one does.
  const int64_t tiles = (task.rows + kLinearRows - 1) / kLinearRows;
  for (int64_t tile = 0, row = 0; tile < tiles; ++tile) {
    const int64_t rows = (task.rows - row + tiles - tile - 1) / (tiles - tile);
    linear_rows<T>(task, row, static_cast<int>(rows));
    row += rows;
  }
}

}  // namespace
}  // namespace tengserve
