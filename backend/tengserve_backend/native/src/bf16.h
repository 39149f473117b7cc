// bfloat16 as the kernels see it: 16 bits, the upper half of a float32. Included by units of every instruction set,
// hence the anonymous namespace: the linker must never take a function compiled for another set.
#pragma once

#include <cstdint>
#include <cstring>

namespace tengserve {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "pairs of bfloat16 are read as 32-bit words");

// The tensors' memory is written as c10::BFloat16, therefore may_alias.
struct __attribute__((may_alias)) Bf16 {
  uint16_t bits;
};

namespace {

inline float to_float(float value) {
  return value;
}

inline float to_float(Bf16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

template <typename T>
inline T from_float(float value);

template <>
inline float from_float<float>(float value) {
  return value;
}

// Round to nearest, ties to even, as torch does. A NaN stays one: rounding its bits up could make an infinity of it.
template <>
inline Bf16 from_float<Bf16>(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (value != value) return Bf16{static_cast<uint16_t>(0x7fc0)};
  return Bf16{static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

}  // namespace
}  // namespace tengserve
