// Integers as bfloat16 by way of float16, which makes 32 numbers with each instruction where float32 makes 16; of
// compilers that do not know it, by way of float32.
//
// They come out of float16 times 2^-16 without any arithmetic: its exponents are five bits and have the bits 0b011 put
// before them, and three bits of the mantissa are rounded off. The sums have to be multiplied by kIntegerScale. Numbers
// below 2^-14, zero included, become something below that: nothing beside a column's largest, which is 128 or more.
#pragma once

#include "float16.h"
#include "linear_unpack.h"

namespace tengserve {
namespace {

#if TENGSERVE_FLOAT16
constexpr float kIntegerScale = 65536;

// Of 32 halves the sixteen from 16 * h on, each twice.
inline __m512h each_twice(const Half* from, int h) {
  const __m512i order = _mm512_set_epi16(15, 15, 14, 14, 13, 13, 12, 12, 11, 11, 10, 10, 9, 9, 8, 8,  //
                                         7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + h * kLanes));
  return _mm512_castsi512_ph(_mm512_permutexvar_epi16(order, _mm512_castsi256_si512(halves)));
}

// To bfloat16, times 2^-16. An eighth of a word whose sign is set begins with 0xf, of another one with 0x0.
inline __m512i from_half(__m512h half) {
  const __m512i eighth = _mm512_mulhrs_epi16(_mm512_castph_si512(half), _mm512_set1_epi16(1 << 12));
  const __m512i kept = _mm512_set1_epi16(static_cast<int16_t>(0x8fff));
  return _mm512_ternarylogic_epi32(eighth, kept, _mm512_set1_epi16(0x3000), 0xea);
}

inline void unpack_scaled(const Int8Group& group, Bf16* to) {
  for (int h = 0; h < 2; ++h) {
    const __m512h scale = each_twice(group.scales, h);
    for (int s = 0; s < 16; ++s) {
      const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(group.integers[s][h]));
      const __m512h integers = _mm512_cvtepi16_ph(_mm512_cvtepi8_epi16(bytes));
      _mm512_storeu_si512(pair_at(to, s, h), from_half(_mm512_mul_ph(integers, scale)));
    }
  }
}

inline void unpack_scaled(const Int4Group& group, Bf16* to) {
  // Twice, for the permutation looks at one bit more than the four.
  const __m512h numbers = _mm512_set_ph(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 15, 14, 13, 12, 11, 10, 9,
                                        8, 7, 6, 5, 4, 3, 2, 1, 0);
  for (int h = 0; h < 2; ++h) {
    const __m512h scale = each_twice(group.scales, h), minimum = each_twice(group.minimums, h);
    for (int four = 0; four < 4; ++four) {
      __m512i codes = _mm512_loadu_si512(group.codes[h][four]);
      for (int s = 0; s < 4; ++s, codes = _mm512_srli_epi16(codes, 4)) {
        const __m512h code = _mm512_permutexvar_ph(codes, numbers);
        _mm512_storeu_si512(pair_at(to, 4 * four + s, h), from_half(_mm512_fmadd_ph(code, scale, minimum)));
      }
    }
  }
}

// 32 inputs of a panel: 1024 numbers.
template <WeightKind kKind>
inline void unpack_scaled(const char* from, Bf16* to) {
  if constexpr (kKind == WeightKind::kInt8) {
    unpack_scaled(*reinterpret_cast<const Int8Group*>(from), to);
  } else {
    unpack_scaled(*reinterpret_cast<const Int4Group*>(from), to);
  }
}

#else
constexpr float kIntegerScale = 1;

template <WeightKind kKind>
inline void unpack_scaled(const char* from, Bf16* to) {
  unpack_group<kKind>(from, to);
}
#endif

}  // namespace
}  // namespace tengserve
