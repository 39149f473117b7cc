// Linear layers whose weights are packed once, in the order in which they are read.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>

#include "checks.h"
#include "isa.h"
#include "operators.h"

namespace tengserve {
namespace {

// Rows of x that one task takes at most, a multiple of a tile's: with many threads and few panels there must be more
// tasks than panels.
constexpr int64_t kTaskRows = 96;
// Multiplications of a call below which no second thread is woken.
constexpr int64_t kWorthThreads = 1 << 15;

// Inputs a packed bfloat16 weight has a multiple of; the rest is zeros. One row of a matrix unit's tile holds as many.
constexpr int64_t kBf16InMultiple = 32;

int64_t panels(int64_t out) {
  return (out + kPanelColumns - 1) / kPanelColumns;
}

int64_t packed_in(at::ScalarType dtype, int64_t in) {
  return dtype == at::kFloat ? in : (in + kBf16InMultiple - 1) / kBf16InMultiple * kBf16InMultiple;
}

// Columns lie in pairs of inputs for bfloat16, alone for float32.
template <typename T>
constexpr int64_t kPair = sizeof(float) / sizeof(T);

template <typename T>
void pack(const T* weight, int64_t out, int64_t in, int64_t padded_in, T* packed) {
  at::parallel_for(0, panels(out), 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      T* to = packed + panel * kPanelColumns * padded_in;
      const int64_t columns = std::min(kPanelColumns, out - panel * kPanelColumns);
      for (int64_t k = 0; k < in; ++k) {
        T* step = to + k / kPair<T> * kPair<T> * kPanelColumns + k % kPair<T>;
        for (int64_t c = 0; c < columns; ++c) {
          step[c * kPair<T>] = weight[(panel * kPanelColumns + c) * in + k];
        }
      }
    }
  });
}

// Rows as tiles for the matrix unit. Rows that fill up the last tile are not read and stay as they are.
at::Tensor as_tiles(const at::Tensor& rows) {
  constexpr int64_t kHeight = 16, kWidth = 32;
  const int64_t count = rows.size(0), in = rows.size(1), width = (in + kWidth - 1) / kWidth * kWidth;
  at::Tensor tiles = at::empty({(count + kHeight - 1) / kHeight * kHeight, width}, rows.options());
  const Bf16* from = memory<const Bf16>(rows);
  Bf16* to = memory<Bf16>(tiles);
  at::parallel_for(0, count, 64, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      Bf16* tile = to + row / kHeight * kHeight * width + row % kHeight * kWidth;
      for (int64_t k = 0; k < width; k += kWidth, tile += kHeight * kWidth) {
        const int64_t there = std::min(kWidth, in - k);
        std::memcpy(tile, from + row * in + k, there * sizeof(Bf16));
        std::memset(static_cast<void*>(tile + there), 0, (kWidth - there) * sizeof(Bf16));
      }
    }
  });
  return tiles;
}

// x [rows, in] as the kernel reads it; its second dimension is the kernel's `in`.
at::Tensor prepare(const at::Tensor& x, int64_t in, Bf16Rows wanted) {
  const at::Tensor rows = x.reshape({-1, in}).contiguous();
  if (x.scalar_type() == at::kFloat) return rows;
  if (wanted == Bf16Rows::kTiles) return as_tiles(rows);
  const auto dtype = wanted == Bf16Rows::kPairs ? at::kBFloat16 : at::kFloat;
  if (in % 2 == 0) return rows.to(dtype);
  at::Tensor padded = at::zeros({rows.size(0), in + 1}, rows.options().dtype(dtype));
  padded.narrow(1, 0, in).copy_(rows);
  return padded;
}

template <typename T>
void multiply(const at::Tensor& x, int64_t rows, const at::Tensor& packed, const T* bias, int64_t padded_in,
              int64_t out_features, T* out) {
  const int64_t in = x.size(1), blocks = (rows + kTaskRows - 1) / kTaskRows;
  const char* const x_memory = memory<const char>(x);
  const T* const weight = memory<const T>(packed);
  const auto kernel = level().kernels<T>().linear;
  const int64_t work = rows * in * out_features;
  const int64_t tasks = panels(out_features) * blocks;
  const int64_t grain = work < kWorthThreads ? tasks : 1;
  at::parallel_for(0, tasks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t panel = task / blocks, row = task % blocks * kTaskRows, column = panel * kPanelColumns;
      LinearTask<T> own{};
      own.x = x_memory + row * in * x.element_size();
      own.rows = std::min(kTaskRows, rows - row);
      own.in = in;
      own.panel = weight + column * padded_in;
      own.bias = bias ? bias + column : nullptr;
      own.out = out + row * out_features + column;
      own.out_stride = out_features;
      own.columns = std::min(kPanelColumns, out_features - column);
      kernel(own);
    }
  });
}

}  // namespace

at::Tensor pack_linear(const at::Tensor& weight) {
  check_float(weight, "weight", 2);
  const int64_t out = weight.size(0), in = weight.size(1);
  TORCH_CHECK(out > 0 && in > 0, "weight must not be empty");
  const at::Tensor source = weight.contiguous();
  const int64_t padded = packed_in(weight.scalar_type(), in);
  at::Tensor packed = at::zeros({panels(out), padded, kPanelColumns}, weight.options());
  with_dtype(weight, [&](auto t) {
    using T = decltype(t);
    pack(memory<const T>(source), out, in, padded, memory<T>(packed));
  });
  return packed;
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                  int64_t in_features, int64_t out_features) {
  check_float(x, "x", -1);
  check_float(packed, "packed", 3);
  check_same_dtype(packed, "packed", x, "x");
  TORCH_CHECK(in_features > 0 && out_features > 0, "in_features and out_features must be at least 1");
  TORCH_CHECK(x.dim() >= 1 && x.size(-1) == in_features, "the last dimension of x must be ", in_features);
  const int64_t padded_in = packed_in(x.scalar_type(), in_features);
  check_size(packed, "packed", 0, panels(out_features));
  check_size(packed, "packed", 1, padded_in);
  check_size(packed, "packed", 2, kPanelColumns);
  check_contiguous(packed, "packed");
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
  const at::Tensor rows = prepare(x, in_features, level().bf16_rows);
  with_dtype(x, [&](auto t) {
    using T = decltype(t);
    multiply<T>(rows, x.numel() / in_features, packed, bias ? memory<const T>(*bias) : nullptr, padded_in,
                out_features, memory<T>(out));
  });
  return out;
}

}  // namespace tengserve
