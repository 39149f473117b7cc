// float16 as groups of integers have it: finite. Arithmetic with it is its own matter, see float16.h.
#pragma once

#include <cstdint>
#include <cstring>

namespace tengserve {

struct Half {
  uint16_t bits;
};

namespace {

inline float to_float(Half value) {
  const uint32_t magnitude = value.bits & 0x7fffu;
  float number = static_cast<float>(magnitude) * 0x1p-24f;  // what exponents do not reach
  if (magnitude >= 0x400) {
    const uint32_t bits = (magnitude << 13) + ((127 - 15) << 23);
    std::memcpy(&number, &bits, sizeof number);
  }
  return value.bits >> 15 ? -number : number;
}

// To the nearest. Its magnitude must be below 2^16, and its mantissa one that float16 has: bfloat16's is.
inline Half to_half(float number) {
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  const uint32_t sign = bits >> 31 << 15, magnitude = bits & 0x7fffffffu;
  const float distance = sign ? -number : number;
  if (distance < 0x1p-14f) return {static_cast<uint16_t>(sign | static_cast<uint32_t>(distance * 0x1p24f + 0.5f))};
  return {static_cast<uint16_t>(sign | ((magnitude - ((127 - 15) << 23)) >> 13))};
}

}  // namespace
}  // namespace tengserve
