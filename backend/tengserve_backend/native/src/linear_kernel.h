// Rows times panels of a packed weight, see kernels.h. A panel is read once a tile of rows, front to back.
#pragma once

#include "kernels.h"
#include "linear_unpack.h"

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

// A panel as it is multiplied.
template <typename T>
struct Panel {
  const T* weights;      // of integers: what they are made into
  const char* groups;    // of integers
  const float* factors;  // of integers, one a column; else null
  int64_t column;        // of its first one in the whole weight
  int64_t columns;       // 1 to 32
};

// One panel of a task; `numbers`: where those of integers will be.
template <typename T>
inline Panel<T> panel_of(const LinearTask<T>& task, int64_t panel, const T* numbers) {
  const char* from = task.weight->panels + panel * task.weight->panel_bytes;
  const int64_t column = panel * kPanelColumns, rest = task.weight->out - column;
  const int64_t columns = rest < kPanelColumns ? rest : kPanelColumns;
  if (task.weight->kind == WeightKind::kFloat) {
    return {reinterpret_cast<const T*>(from), nullptr, nullptr, column, columns};
  }
  const auto* factors = reinterpret_cast<const PanelFactors*>(from);
  return {numbers, reinterpret_cast<const char*>(factors + 1), factors->columns, column, columns};
}

// One row's results from `column` of the panel on: the sums and the bias, as many of 16 as there are columns.
template <typename T>
inline void store_sums(const LinearTask<T>& task, const Panel<T>& panel, int64_t row, int64_t column, Vec sums) {
  if (panel.factors) sums = sums * load(panel.factors + column);
  T* to = task.out + row * task.out_stride + panel.column + column;
  const T* bias = task.bias ? task.bias + panel.column + column : nullptr;
  const int64_t rest = panel.columns - column;
  if (rest >= kLanes) {
    store(to, bias ? sums + load(bias) : sums);
  } else {
    const int width = static_cast<int>(rest);
    store_first(to, bias ? sums + load_first(bias, width) : sums, width);
  }
}

// R rows times kVecs * 16 columns from column0 on. Integers become numbers 32 inputs at a time, which then never leave
// the nearest cache.
template <WeightKind kKind, typename T, int R, int kVecs>
void linear_tile(const LinearTask<T>& task, const Panel<T>& panel, int64_t row0, int64_t column0) {
  using Input = typename LinearTypes<T>::Input;
  constexpr int64_t kStep = LinearTypes<T>::kStep;
  const int64_t in = task.weight->in;
  const Input* x[R];
  for (int r = 0; r < R; ++r) x[r] = static_cast<const Input*>(task.x) + (row0 + r) * in;
  Vec out[R][kVecs];
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < kVecs; ++c) out[r][c] = zeros();
  }
  if constexpr (kKind == WeightKind::kFloat) {
    const T* step = panel.weights + column0 * kStep;
    for (int64_t k = 0; k < in; k += kStep, step += kStep * kPanelColumns) {
      for (int c = 0; c < kVecs; ++c) {
        __builtin_prefetch(reinterpret_cast<const char*>(step + c * kStep * kLanes) + kAhead);
      }
      multiply_step<R, kVecs>(x, k, step, out);
    }
  } else {
    constexpr int64_t kBytes = group_bytes<T>(kKind);
    alignas(64) T numbers[kGroupNumbers];
    static_assert(kLanes * 2 == kPanelColumns, "a Vec is half of a panel's columns");
    const int half = kVecs == 2 ? 0 : static_cast<int>(column0 / kLanes);
    const char* from = panel.groups;
    for (int64_t k = 0; k < in; from += kBytes) {
      for (int64_t line = 0; line < kBytes; line += 64) __builtin_prefetch(from + kAhead + line);
      unpack_group<kKind, kVecs>(from, numbers, half);
      const T* step = numbers + column0 * kStep;
      for (const int64_t end = k + kGroupInputs; k < end; k += kStep, step += kStep * kPanelColumns) {
        multiply_step<R, kVecs>(x, k, step, out);
      }
    }
  }
  for (int c = 0; c < kVecs && column0 + c * kLanes < panel.columns; ++c) {
    for (int r = 0; r < R; ++r) store_sums(task, panel, row0 + r, column0 + c * kLanes, out[r][c]);
  }
}

template <WeightKind kKind, typename T, int R = kLinearRows>
void linear_rows(const LinearTask<T>& task, const Panel<T>& panel, int64_t row0, int rows) {
  if constexpr (R > 1) {
    if (rows < R) return linear_rows<kKind, T, R - 1>(task, panel, row0, rows);
  }
  for (int64_t column = 0; column < panel.columns; column += kLinearVecs * kLanes) {
    linear_tile<kKind, T, R, kLinearVecs>(task, panel, row0, column);
  }
}

// All of a panel's numbers into the task's scratch, while the next panel, if there is one, comes nearer.
template <WeightKind kKind, typename T>
inline void unpack_panel(const LinearTask<T>& task, const Panel<T>& panel, bool fetch) {
  const PackedWeight& weight = *task.weight;
  constexpr int64_t kBytes = group_bytes<T>(kKind);
  const char* from = panel.groups;
  T* to = task.scratch;
  for (int64_t k = 0; k < weight.in; k += kGroupInputs, from += kBytes, to += kGroupNumbers) {
    for (int64_t line = 0; fetch && line < kBytes; line += 64) __builtin_prefetch(from + weight.panel_bytes + line);
    unpack_group<kKind>(from, to);
  }
}

// One panel. Integers become numbers as they are needed where one tile has all rows, and for more tiles all at once.
template <WeightKind kKind, typename T>
void linear_panel(const LinearTask<T>& task, const Panel<T>& panel, bool more) {
  if (kKind != WeightKind::kFloat && task.rows <= kLinearRows) {
    return linear_rows<kKind, T>(task, panel, 0, static_cast<int>(task.rows));
  }
  if constexpr (kKind != WeightKind::kFloat) unpack_panel<kKind>(task, panel, more);
  // Tiles of nearly equal rows: a last one of a single row would cost nearly what a full one does.
  const int64_t tiles = (task.rows + kLinearRows - 1) / kLinearRows;
  for (int64_t tile = 0, row = 0; tile < tiles; ++tile) {
    const int64_t rows = (task.rows - row + tiles - tile - 1) / (tiles - tile);
    linear_rows<WeightKind::kFloat, T>(task, panel, row, static_cast<int>(rows));
    row += rows;
  }
}

template <typename T>
void linear(const LinearTask<T>& task) {
  for (int64_t index = task.panel; index < task.end_panel; ++index) {
    const Panel<T> panel = panel_of<T>(task, index, task.scratch);
    const bool more = index + 1 < task.end_panel;
    switch (task.weight->kind) {
      case WeightKind::kFloat:
        linear_panel<WeightKind::kFloat>(task, panel, more);
        break;
      case WeightKind::kInt8:
        linear_panel<WeightKind::kInt8>(task, panel, more);
        break;
      case WeightKind::kInt4:
        linear_panel<WeightKind::kInt4>(task, panel, more);
        break;
    }
  }
}

}  // namespace
}  // namespace tengserve
