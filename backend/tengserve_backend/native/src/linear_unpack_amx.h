// Integers as bfloat16 by way of float16, which makes 32 numbers with each instruction where float32 makes 16; of
// compilers that do not know it, by way of float32.
//
// Numbers are scaled by 2^8 for float16 and come out of it scaled by 2^-8, without any arithmetic: float16's exponents
// are five bits and have the bits 0b011 put before them, and three bits of the mantissa are rounded off. The sums have
// to be multiplied by kIntegerScale. A number below 2^-22 becomes something below that, zero included; a group's integers
// are steps of at least 2^-14, or it goes by way of float32.
#pragma once

#include "float16.h"
#include "linear_unpack.h"

namespace tengserve {
namespace {

#if TENGSERVE_FLOAT16
constexpr float kIntegerScale = 256;

constexpr int kMagnitude = 0x7fff;

// 32 words from sixteen, each twice.
inline __m512i lower_twice(__m512i pairs) {
  return _mm512_mask_blend_epi16(0xaaaaaaaau, pairs, _mm512_slli_epi32(pairs, 16));
}
inline __m512i upper_twice(__m512i pairs) {
  return _mm512_mask_blend_epi16(0x55555555u, pairs, _mm512_srli_epi32(pairs, 16));
}

// Bfloat16 to float16, times 2^8.
inline __m512h to_half(__m512i bf16) {
  const __m512i sign = _mm512_set1_epi16(static_cast<int16_t>(~kMagnitude));
  constexpr int kBetween = 127 - 15 - 8;  // exponents
  const __m512i magnitude = _mm512_subs_epu16(_mm512_andnot_si512(sign, bf16), _mm512_set1_epi16(kBetween << 7));
  return _mm512_castsi512_ph(_mm512_ternarylogic_epi32(bf16, sign, _mm512_slli_epi16(magnitude, 3), 0xea));
}

// And to bfloat16, times 2^-16. An eighth of a word whose sign is set begins with 0xf, of another one with 0x0.
inline __m512i from_half(__m512h half) {
  const __m512i eighth = _mm512_mulhrs_epi16(_mm512_castph_si512(half), _mm512_set1_epi16(1 << 12));
  const __m512i kept = _mm512_set1_epi16(static_cast<int16_t>(0x8fff));
  return _mm512_ternarylogic_epi32(eighth, kept, _mm512_set1_epi16(0x3000), 0xea);
}

// Whether float16 has all numbers of some columns: the magnitudes of bfloat16 are less than `most`, and those of the
// scales, the words of that mask, at least 2^-14, so that what becomes of a zero is nothing beside a step of integers.
inline bool fits(__m512i bf16, int most, __mmask32 scales) {
  const __m512i magnitudes = _mm512_and_si512(bf16, _mm512_set1_epi16(kMagnitude));
  return _mm512_cmpge_epu16_mask(magnitudes, _mm512_set1_epi32(most)) == 0 &&
         _mm512_mask_cmplt_epu16_mask(scales, magnitudes, _mm512_set1_epi16(0x3880)) == 0;
}

inline Bf16 scaled(Bf16 factor) {
  return from_float<Bf16>(to_float(factor) / kIntegerScale);
}

// Groups of numbers that float16 has not.
inline void unpack_otherwise(Int8Group group, Bf16* to) {
  for (Bf16& scale : group.scales) scale = scaled(scale);
  unpack(group, to);
}
inline void unpack_otherwise(Int4Group group, Bf16* to) {
  for (uint32_t& column : group.columns) {
    const Bf16 scale{static_cast<uint16_t>(column)}, minimum{static_cast<uint16_t>(column >> 16)};
    column = static_cast<uint32_t>(scaled(minimum).bits) << 16 | scaled(scale).bits;
  }
  unpack(group, to);
}

inline void unpack_scaled(const Int8Group& group, Bf16* to) {
  const __m512i scales = _mm512_loadu_si512(group.scales);
  // Up to 2.
  if (!fits(scales, 0x40004000, ~__mmask32{0})) return unpack_otherwise(group, to);
  for (int h = 0; h < 2; ++h) {
    const __m256i half = h ? _mm512_extracti64x4_epi64(scales, 1) : _mm512_castsi512_si256(scales);
    const __m512h scale = to_half(lower_twice(_mm512_cvtepu16_epi32(half)));
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
  const __m512i columns[] = {_mm512_loadu_si512(group.columns), _mm512_loadu_si512(group.columns + kLanes)};
  for (const __m512i& each : columns) {
    // Scales up to 8, minimums to 128.
    if (!fits(each, 0x43004100, 0x55555555u)) return unpack_otherwise(group, to);
  }
  for (int h = 0; h < 2; ++h) {
    const __m512h scale = to_half(lower_twice(columns[h])), minimum = to_half(upper_twice(columns[h]));
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
