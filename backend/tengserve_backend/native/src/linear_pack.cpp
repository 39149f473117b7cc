// Weights in the order in which the linear operators read them, see WeightKind.
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "checks.h"
#include "linear.h"
#include "operators.h"
#include "weight_memory.h"

namespace tengserve {
namespace {

int64_t panels_of(int64_t out) {
  return (out + kPanelColumns - 1) / kPanelColumns;
}

// Inputs of a packed weight; the matrix unit and groups want a multiple of 32.
int64_t padded_in(WeightKind kind, at::ScalarType dtype, int64_t in) {
  if (kind == WeightKind::kFloat && dtype == at::kFloat) return in;
  return (in + kGroupInputs - 1) / kGroupInputs * kGroupInputs;
}

int64_t panel_bytes(WeightKind kind, at::ScalarType dtype, int64_t padded) {
  switch (kind) {
    case WeightKind::kInt8:
      return sizeof(PanelFactors) + padded / kGroupInputs * static_cast<int64_t>(sizeof(Int8Group));
    case WeightKind::kInt4:
      return sizeof(PanelFactors) + padded / kGroupInputs * static_cast<int64_t>(sizeof(Int4Group));
    case WeightKind::kFloat:
      break;
  }
  return kPanelColumns * padded * static_cast<int64_t>(c10::elementSize(dtype));
}

// Calls f with each panel's index, its first column and how many it has.
template <typename F>
void for_each_panel(int64_t out, F f) {
  at::parallel_for(0, panels_of(out), 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t column = panel * kPanelColumns;
      f(panel, column, std::min(kPanelColumns, out - column));
    }
  });
}

void check_weight(const at::Tensor& weight, const char* name) {
  check_tensor(weight, name, 2);
  TORCH_CHECK(weight.numel() > 0, name, " must not be empty");
}

// Scales or minimums: bfloat16 [out, groups].
void check_of_groups(const at::Tensor& numbers, const char* name, int64_t out, int64_t groups) {
  check_tensor(numbers, name, 2);
  TORCH_CHECK(numbers.scalar_type() == at::kBFloat16, name, " must be bfloat16, not ", numbers.scalar_type());
  check_size(numbers, name, 0, out);
  check_size(numbers, name, 1, groups);
}

// A column's factor, for the scales of its groups and the minimums, where they have any.
float column_factor(const Bf16* scales, const Bf16* minimums, int64_t groups) {
  float largest = 0;
  for (const Bf16* numbers : {scales, minimums}) {
    for (int64_t g = 0; numbers && g < groups; ++g) {
      const float magnitude = std::fabs(to_float(numbers[g]));
      if (!std::isfinite(magnitude)) return std::numeric_limits<float>::quiet_NaN();
      largest = std::max(largest, magnitude);
    }
  }
  if (largest == 0) return 0;
  constexpr int kLeast = std::numeric_limits<float>::min_exponent - 1;
  return std::ldexp(1.0f, std::max(std::ilogb(largest) + 1 - kLargestExponent, kLeast));
}

// One panel of integers.
template <typename Group>
struct IntegerPanel {
  PanelFactors* factors;
  Group* groups;

  IntegerPanel(const at::Tensor& packed, int64_t panel)
      : factors(reinterpret_cast<PanelFactors*>(memory<char>(packed) + panel * packed.size(1))),
        groups(reinterpret_cast<Group*>(factors + 1)) {}

  // Sets a column's factor, and calls put(group, its scale, its minimum).
  template <typename F>
  void set_column(int64_t column, const Bf16* scales, const Bf16* minimums, int64_t count, F put) const {
    const float factor = column_factor(scales, minimums, count);
    factors->columns[column] = factor;
    const float inverse = factor > 0 ? 1 / factor : 0;
    const auto half = [&](const Bf16* numbers, int64_t g) {
      return inverse && numbers ? to_half(to_float(numbers[g]) * inverse) : Half{0};
    };
    for (int64_t g = 0; g < count; ++g) put(groups[g], half(scales, g), half(minimums, g));
  }
};

at::Tensor empty_panels(WeightKind kind, int64_t out, int64_t groups) {
  return weight_zeros({panels_of(out), panel_bytes(kind, at::kFloat, groups * kGroupInputs)}, at::kByte);
}

}  // namespace

PackedWeight packed_weight(const at::Tensor& packed, WeightKind kind, int64_t in, int64_t out, at::ScalarType dtype) {
  const int64_t padded = padded_in(kind, dtype, in), bytes = panel_bytes(kind, dtype, padded);
  if (kind == WeightKind::kFloat) {
    check_tensor(packed, "packed", 3);
    TORCH_CHECK(packed.scalar_type() == dtype, "packed is ", packed.scalar_type(), " but x is ", dtype);
    check_size(packed, "packed", 1, padded);
    check_size(packed, "packed", 2, kPanelColumns);
  } else {
    check_tensor(packed, "packed", 2);
    TORCH_CHECK(packed.scalar_type() == at::kByte, "packed must be uint8, not ", packed.scalar_type());
    check_size(packed, "packed", 1, bytes);
  }
  check_size(packed, "packed", 0, panels_of(out));
  check_contiguous(packed, "packed");
  return {kind, memory<const char>(packed), bytes, padded, out};
}

at::Tensor pack_linear(const at::Tensor& weight) {
  check_float(weight, "weight", 2);
  check_weight(weight, "weight");
  const int64_t out = weight.size(0), in = weight.size(1);
  const int64_t padded = padded_in(WeightKind::kFloat, weight.scalar_type(), in);
  const at::Tensor source = weight.contiguous();
  at::Tensor packed = weight_zeros({panels_of(out), padded, kPanelColumns}, weight.scalar_type());
  with_dtype(weight, [&](auto t) {
    using T = decltype(t);
    constexpr int64_t kPair = sizeof(float) / sizeof(T);
    const T* from = memory<const T>(source);
    T* panels = memory<T>(packed);
    for_each_panel(out, [&](int64_t panel, int64_t column, int64_t columns) {
      T* to = panels + panel * kPanelColumns * padded;
      for (int64_t k = 0; k < in; ++k) {
        T* step = to + k / kPair * kPair * kPanelColumns + k % kPair;
        for (int64_t c = 0; c < columns; ++c) step[c * kPair] = from[(column + c) * in + k];
      }
    });
  });
  return packed;
}

at::Tensor pack_linear_int8(const at::Tensor& integers, const at::Tensor& scales) {
  check_weight(integers, "integers");
  TORCH_CHECK(integers.scalar_type() == at::kChar, "integers must be int8, not ", integers.scalar_type());
  const int64_t out = integers.size(0), in = integers.size(1), groups = (in + kGroupInputs - 1) / kGroupInputs;
  check_of_groups(scales, "scales", out, groups);
  at::Tensor packed = empty_panels(WeightKind::kInt8, out, groups);
  const at::Tensor source = integers.contiguous(), of_groups = scales.contiguous();
  const int8_t* from = memory<const int8_t>(source);
  const Bf16* scale = memory<const Bf16>(of_groups);
  for_each_panel(out, [&](int64_t index, int64_t column, int64_t columns) {
    const IntegerPanel<Int8Group> panel(packed, index);
    for (int64_t c = 0; c < columns; ++c) {
      for (int64_t k = 0; k < in; ++k) {
        Int8Group& group = panel.groups[k / kGroupInputs];
        group.integers[k % kGroupInputs / 2][c / 16][c % 16][k % 2] = from[(column + c) * in + k];
      }
      panel.set_column(c, scale + (column + c) * groups, nullptr, groups,
                       [&](Int8Group& group, Half own, Half) { group.scales[c] = own; });
    }
  });
  return packed;
}

at::Tensor pack_linear_int4(const at::Tensor& integers, const at::Tensor& scales, const at::Tensor& minimums) {
  check_weight(integers, "integers");
  TORCH_CHECK(integers.scalar_type() == at::kByte, "integers must be uint8, not ", integers.scalar_type());
  const int64_t out = integers.size(0), in = integers.size(1), groups = (in + kGroupInputs - 1) / kGroupInputs;
  check_of_groups(scales, "scales", out, groups);
  check_of_groups(minimums, "minimums", out, groups);
  at::Tensor packed = empty_panels(WeightKind::kInt4, out, groups);
  const at::Tensor source = integers.contiguous(), of_groups = scales.contiguous(), lowest = minimums.contiguous();
  const uint8_t* from = memory<const uint8_t>(source);
  const Bf16 *scale = memory<const Bf16>(of_groups), *minimum = memory<const Bf16>(lowest);
  for_each_panel(out, [&](int64_t index, int64_t column, int64_t columns) {
    const IntegerPanel<Int4Group> panel(packed, index);
    for (int64_t c = 0; c < columns; ++c) {
      for (int64_t k = 0; k < in; ++k) {
        const int64_t s = k % kGroupInputs / 2;
        uint16_t& codes = panel.groups[k / kGroupInputs].codes[c / 16][s / 4][c % 16][k % 2];
        codes = static_cast<uint16_t>(codes | (from[(column + c) * in + k] & 15) << s % 4 * 4);
      }
      const int64_t first = (column + c) * groups;
      panel.set_column(c, scale + first, minimum + first, groups, [&](Int4Group& group, Half own, Half least) {
        group.scales[c] = own;
        group.minimums[c] = least;
      });
    }
  });
  return packed;
}

}  // namespace tengserve
