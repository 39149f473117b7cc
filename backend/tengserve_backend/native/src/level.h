// The table of the instruction set that a unit is compiled for: the unit includes its vec_*.h, then this, and defines
// its Level by make_level. Such a unit includes no C++ library and no torch: the linker could take a function
// compiled here for the whole program, and a lesser CPU would fault in it.
#pragma once

#include "vec_math.h"

#include "attention_kernel.h"
#include "linear_kernel.h"
#include "row_kernels.h"

namespace tengserve {
namespace {

static_assert(kTileRows <= kMaxTileRows, "tiles have memory for kMaxTileRows rows");
static_assert(kLanes == kBlockSize, "a block of keys is a Vec");

template <typename T>
constexpr Kernels<T> make_kernels() {
  constexpr AttentionKernels<T> kAttention = {kTileRows, pack_query, attend<T>, fold, finish<T>};
  return {kAttention, kAttention, linear<T>, {rms_norm<T>, silu_mul<T>, rotary<T>, add<T>, first_maximum<T>}};
}

constexpr Level make_level(const char* name) {
#ifdef __AVX512BF16__
  constexpr Bf16Rows kRows = Bf16Rows::kPairs;
#else
  constexpr Bf16Rows kRows = Bf16Rows::kFloat32;
#endif
  return {name, kRows, make_kernels<float>(), make_kernels<Bf16>()};
}

}  // namespace
}  // namespace tengserve
