// Linear layers whose weights are packed once, in the order in which they are read.
#include "linear.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>

#include "checks.h"
#include "isa.h"
#include "operators.h"

namespace tengserve {
namespace {

// Multiplications of a call below which no second thread is woken.
constexpr int64_t kWorthThreads = 1 << 15;
// Bytes of x that panels are multiplied by in one go, at most: a good part of a second-level cache.
constexpr int64_t kBlockBytes = 1 << 20;
// Rows are split into no smaller parts, so that a panel's way into the cache is worth it, and at multiples of a tile.
constexpr int64_t kLeastRows = 96, kRowMultiple = 32;

constexpr int64_t kCacheLine = 64;
constexpr int64_t kTileRows = 16, kTileWidth = 32;

constexpr int64_t rounded_up(int64_t count, int64_t multiple) {
  return (count + multiple - 1) / multiple * multiple;
}

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

// Memory of the calling thread, on a cache line; what was there before is lost.
void* thread_scratch(int64_t bytes) {
  static thread_local std::unique_ptr<void, Free> memory;
  static thread_local int64_t size = 0;
  if (size < bytes) {
    size = 0;
    memory.reset(std::aligned_alloc(kCacheLine, rounded_up(bytes, kCacheLine)));
    if (!memory) throw std::bad_alloc();
    size = bytes;
  }
  return memory.get();
}

// What the kernel reads rows of x as.
template <typename T>
Bf16Rows rows_of() {
  return std::is_same_v<T, float> ? Bf16Rows::kFloat32 : level().bf16_rows;
}

int64_t row_bytes(const PackedWeight& weight, Bf16Rows rows) {
  return weight.in * static_cast<int64_t>(rows == Bf16Rows::kFloat32 ? sizeof(float) : sizeof(Bf16));
}

template <typename T>
void multiply(const at::Tensor& x, int64_t in, const PackedWeight& weight, const T* bias, T* out) {
  const int64_t rows = x.numel() / in, panels = panel_count(weight);
  const at::Tensor source = x.contiguous();
  const T* from = memory<const T>(source);
  const Bf16Rows form = rows_of<T>();
  const bool ready = in == weight.in && (std::is_same_v<T, float> || form == Bf16Rows::kPairs);
  at::Tensor held;
  if (!ready) {
    held = at::empty({prepared_bytes<T>(weight, rows)}, at::TensorOptions().dtype(at::kByte));
    at::parallel_for(0, rows, kLeastRows, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) prepare_row<T>(weight, from + r * in, in, r, memory<char>(held));
    });
  }
  const char* const prepared = ready ? reinterpret_cast<const char*>(from) : memory<const char>(held);

  const int64_t threads = at::get_num_threads(), bytes = row_bytes(weight, form);
  const int64_t for_cache = (rows * bytes + kBlockBytes - 1) / kBlockBytes;
  const int64_t for_threads = threads > 1 ? (4 * threads + panels - 1) / panels : 1;
  const int64_t most = (rows + kLeastRows - 1) / kLeastRows;
  const int64_t block = rounded_up((rows + most - 1) / std::clamp(std::max(for_cache, for_threads), int64_t{1}, most),
                                   kRowMultiple);
  const int64_t tasks = (rows + block - 1) / block * panels;
  const int64_t grain = rows * in * weight.out < kWorthThreads ? tasks : 1;
  at::parallel_for(0, tasks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end;) {
      const int64_t row = task / panels * block, panel = task % panels, count = std::min(panels - panel, end - task);
      linear_panels<T>(weight, prepared + row * bytes, std::min(block, rows - row), panel, panel + count, bias,
                       out + row * weight.out, weight.out);
      task += count;
    }
  });
}

at::Tensor linear_of(WeightKind kind, const at::Tensor& x, const at::Tensor& packed,
                     const std::optional<at::Tensor>& bias, int64_t in_features, int64_t out_features) {
  check_float(x, "x", -1);
  TORCH_CHECK(in_features > 0 && out_features > 0, "in_features and out_features must be at least 1");
  TORCH_CHECK(x.dim() >= 1 && x.size(-1) == in_features, "the last dimension of x must be ", in_features);
  const PackedWeight weight = packed_weight(packed, kind, in_features, out_features, x.scalar_type());
  if (bias) {
    check_tensor(*bias, "bias", 1);
    check_same_dtype(*bias, "bias", x, "x");
    check_size(*bias, "bias", 0, out_features);
    check_contiguous(*bias, "bias");
  }
  auto sizes = x.sizes().vec();
  sizes.back() = out_features;
  at::Tensor out = at::empty(sizes, x.options());
  if (out.numel() == 0) return out;
  with_dtype(x, [&](auto t) {
    using T = decltype(t);
    multiply<T>(x, in_features, weight, bias ? memory<const T>(*bias) : nullptr, memory<T>(out));
  });
  return out;
}

}  // namespace

template <typename T>
int64_t prepared_bytes(const PackedWeight& weight, int64_t rows) {
  const Bf16Rows form = rows_of<T>();
  return row_bytes(weight, form) * (form == Bf16Rows::kTiles ? rounded_up(rows, kTileRows) : rows);
}

template <typename T>
void prepare_columns(const PackedWeight& weight, const T* x, int64_t column, int64_t count, int64_t row,
                     void* prepared) {
  const Bf16Rows form = rows_of<T>();
  if (form == Bf16Rows::kFloat32) {
    float* to = static_cast<float*>(prepared) + row * weight.in + column;
    for (int64_t c = 0; c < count; ++c) to[c] = to_float(x[c]);
    return;
  }
  T* to = static_cast<T*>(prepared);
  if (form == Bf16Rows::kPairs) {
    std::memcpy(static_cast<void*>(to + row * weight.in + column), x, count * sizeof(T));
    return;
  }
  // Other rows of a tile lie between its pieces of this one.
  to += row / kTileRows * kTileRows * weight.in + row % kTileRows * kTileWidth;
  for (int64_t c = column, end = column + count; c < end;) {
    const int64_t within = c % kTileWidth, there = std::min(kTileWidth - within, end - c);
    void* const piece = to + (c - within) * kTileRows + within;
    if (there == kTileWidth) {
      std::memcpy(piece, x, kTileWidth * sizeof(T));  // Of a size that the compiler knows: nearly all pieces are whole.
    } else {
      std::memcpy(piece, x, there * sizeof(T));
    }
    c += there;
    x += there;
  }
}

template <typename T>
void prepare_row(const PackedWeight& weight, const T* x, int64_t in, int64_t row, void* prepared) {
  constexpr T kZeros[kGroupInputs] = {};
  prepare_columns(weight, x, 0, in, row, prepared);
  prepare_columns(weight, kZeros, in, weight.in - in, row, prepared);
}

template <typename T>
void linear_panels(const PackedWeight& weight, const void* prepared, int64_t rows, int64_t panel, int64_t end_panel,
                   const T* bias, T* out, int64_t out_stride) {
  LinearTask<T> task{};
  task.weight = &weight;
  task.x = prepared;
  task.rows = rows;
  task.panel = panel;
  task.end_panel = end_panel;
  task.bias = bias;
  task.out = out;
  task.out_stride = out_stride;
  if (weight.kind != WeightKind::kFloat) {
    task.scratch = static_cast<T*>(thread_scratch(weight.in * kPanelColumns * static_cast<int64_t>(sizeof(T))));
  }
  level().kernels<T>().linear(task);
}

template int64_t prepared_bytes<float>(const PackedWeight&, int64_t);
template int64_t prepared_bytes<Bf16>(const PackedWeight&, int64_t);
template void prepare_row(const PackedWeight&, const float*, int64_t, int64_t, void*);
template void prepare_row(const PackedWeight&, const Bf16*, int64_t, int64_t, void*);
template void prepare_columns(const PackedWeight&, const float*, int64_t, int64_t, int64_t, void*);
template void prepare_columns(const PackedWeight&, const Bf16*, int64_t, int64_t, int64_t, void*);
template void linear_panels(const PackedWeight&, const void*, int64_t, int64_t, int64_t, const float*, float*, int64_t);
template void linear_panels(const PackedWeight&, const void*, int64_t, int64_t, int64_t, const Bf16*, Bf16*, int64_t);

at::Tensor linear(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                  int64_t in_features, int64_t out_features) {
  return linear_of(WeightKind::kFloat, x, packed, bias, in_features, out_features);
}

at::Tensor linear_int8(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                       int64_t in_features, int64_t out_features) {
  return linear_of(WeightKind::kInt8, x, packed, bias, in_features, out_features);
}

at::Tensor linear_int4(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                       int64_t in_features, int64_t out_features) {
  return linear_of(WeightKind::kInt4, x, packed, bias, in_features, out_features);
}

}  // namespace tengserve
