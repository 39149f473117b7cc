// Integers of a packed weight as the numbers that are multiplied, in the order that kFloat has, see WeightKind. scale *
// integer is exact in float32, and one or two roundings follow: the same bits from every instruction set.
#pragma once

#include "kernels.h"

namespace tengserve {
namespace {

constexpr int64_t kGroupNumbers = kGroupInputs * kPanelColumns;

// Bytes that 32 inputs of a panel take.
template <typename T>
constexpr int64_t group_bytes(WeightKind kind) {
  if (kind == WeightKind::kInt8) return sizeof(Int8Group);
  if (kind == WeightKind::kInt4) return sizeof(Int4Group);
  return kGroupNumbers * sizeof(T);
}

#ifdef __AVX512F__
// Sixteen columns of an even and an odd input.
inline void store_pair(float* even, __m512 a, __m512 b) {
  _mm512_storeu_ps(even, a);
  _mm512_storeu_ps(even + kPanelColumns, b);
}
inline void store_pair(Bf16* pairs, __m512 a, __m512 b) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i low = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(a), half), 16);
  const __m512i high = _mm512_add_epi32(_mm512_castps_si512(b), half);
  _mm512_storeu_si512(pairs, _mm512_mask_blend_epi16(0xaaaaaaaau, low, high));
}

// Of inputs 2 * s and the next, columns 16 * h on.
template <typename T>
inline T* pair_at(T* numbers, int s, int h) {
  return numbers + s * 2 * kPanelColumns + h * (sizeof(T) == sizeof(float) ? kLanes : 2 * kLanes);
}

inline __m512 load_halves(const Half* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

template <int kHalves, typename T>
inline void unpack(const Int8Group& group, T* to, int first) {
  const __m512 scales[] = {load_halves(group.scales), load_halves(group.scales + kLanes)};
  for (int s = 0; s < 16; ++s) {
    for (int h = first; h < first + kHalves; ++h) {
      const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(group.integers[s][h]));
      const __m512i pairs = _mm512_cvtepi8_epi16(bytes);
      const __m512i even = _mm512_srai_epi32(_mm512_slli_epi32(pairs, 16), 16), odd = _mm512_srai_epi32(pairs, 16);
      store_pair(pair_at(to, s, h), _mm512_mul_ps(_mm512_cvtepi32_ps(even), scales[h]),
                 _mm512_mul_ps(_mm512_cvtepi32_ps(odd), scales[h]));
    }
  }
}

template <int kHalves, typename T>
inline void unpack(const Int4Group& group, T* to, int first) {
  // The permutation looks at the lowest four bits of each lane alone.
  const __m512 numbers = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  for (int h = first; h < first + kHalves; ++h) {
    const __m512 scale = load_halves(group.scales + h * kLanes), minimum = load_halves(group.minimums + h * kLanes);
    for (int four = 0; four < 4; ++four) {
      __m512i even = _mm512_loadu_si512(group.codes[h][four]), odd = _mm512_srli_epi32(even, 16);
      for (int s = 0; s < 4; ++s) {
        store_pair(pair_at(to, 4 * four + s, h),
                   _mm512_fmadd_ps(_mm512_permutexvar_ps(even, numbers), scale, minimum),
                   _mm512_fmadd_ps(_mm512_permutexvar_ps(odd, numbers), scale, minimum));
        even = _mm512_srli_epi32(even, 4);
        odd = _mm512_srli_epi32(odd, 4);
      }
    }
  }
}
#elif defined(__AVX2__)
// Eight columns of an even and an odd input.
inline void store_pair(float* even, __m256 a, __m256 b) {
  _mm256_storeu_ps(even, a);
  _mm256_storeu_ps(even + kPanelColumns, b);
}
inline void store_pair(Bf16* pairs, __m256 a, __m256 b) {
  const __m256i half = _mm256_set1_epi32(0x8000);
  const __m256i low = _mm256_srli_epi32(_mm256_add_epi32(_mm256_castps_si256(a), half), 16);
  const __m256i high = _mm256_add_epi32(_mm256_castps_si256(b), half);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(pairs), _mm256_blend_epi16(low, high, 0xaa));
}

// Of inputs 2 * s and the next, columns 8 * q on.
template <typename T>
inline T* pair_at(T* numbers, int s, int q) {
  return numbers + s * 2 * kPanelColumns + q * (sizeof(T) == sizeof(float) ? 8 : 16);
}

inline __m256 load_halves(const Half* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

template <int kHalves, typename T>
inline void unpack(const Int8Group& group, T* to, int first) {
  for (int q = 2 * first; q < 2 * (first + kHalves); ++q) {
    const __m256 scales = load_halves(group.scales + 8 * q);
    for (int s = 0; s < 16; ++s) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(group.integers[s][q / 2][q % 2 * 8]));
      const __m256i pairs = _mm256_cvtepi8_epi16(bytes);
      const __m256i even = _mm256_srai_epi32(_mm256_slli_epi32(pairs, 16), 16), odd = _mm256_srai_epi32(pairs, 16);
      store_pair(pair_at(to, s, q), _mm256_mul_ps(_mm256_cvtepi32_ps(even), scales),
                 _mm256_mul_ps(_mm256_cvtepi32_ps(odd), scales));
    }
  }
}

template <int kHalves, typename T>
inline void unpack(const Int4Group& group, T* to, int first) {
  const __m256i code = _mm256_set1_epi32(15);
  for (int q = 2 * first; q < 2 * (first + kHalves); ++q) {
    const __m256 scale = load_halves(group.scales + 8 * q), minimum = load_halves(group.minimums + 8 * q);
    const auto number = [&](__m256i codes) {
      return _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_and_si256(codes, code)), scale, minimum);
    };
    for (int four = 0; four < 4; ++four) {
      __m256i even = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(group.codes[q / 2][four][q % 2 * 8]));
      for (int s = 0; s < 4; ++s) {
        store_pair(pair_at(to, 4 * four + s, q), number(even), number(_mm256_srli_epi32(even, 16)));
        even = _mm256_srli_epi32(even, 4);
      }
    }
  }
}
#else
inline void store_pair(float* numbers, int s, int column, float even, float odd) {
  numbers[2 * s * kPanelColumns + column] = even;
  numbers[(2 * s + 1) * kPanelColumns + column] = odd;
}
inline void store_pair(Bf16* numbers, int s, int column, float even, float odd) {
  const auto nearest = [](float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return Bf16{static_cast<uint16_t>((bits + 0x8000) >> 16)};
  };
  numbers[2 * (s * kPanelColumns + column)] = nearest(even);
  numbers[2 * (s * kPanelColumns + column) + 1] = nearest(odd);
}

template <int kHalves, typename T>
inline void unpack(const Int8Group& group, T* to, int first) {
  for (int h = first; h < first + kHalves; ++h) {
    float scale[16];
    for (int i = 0; i < 16; ++i) scale[i] = to_float(group.scales[16 * h + i]);
    for (int s = 0; s < 16; ++s) {
      const auto& pairs = group.integers[s][h];
      const auto number = [&](int i, int p) { return scale[i] * static_cast<float>(pairs[i][p]); };
      for (int i = 0; i < 16; ++i) store_pair(to, s, 16 * h + i, number(i, 0), number(i, 1));
    }
  }
}

template <int kHalves, typename T>
inline void unpack(const Int4Group& group, T* to, int first) {
  for (int h = first; h < first + kHalves; ++h) {
    float scale[16], minimum[16];
    for (int i = 0; i < 16; ++i) {
      scale[i] = to_float(group.scales[16 * h + i]);
      minimum[i] = to_float(group.minimums[16 * h + i]);
    }
    for (int s = 0; s < 16; ++s) {
      const auto& pairs = group.codes[h][s / 4];
      const auto number = [&](int i, int p) {
        return scale[i] * static_cast<float>(pairs[i][p] >> s % 4 * 4 & 15) + minimum[i];
      };
      for (int i = 0; i < 16; ++i) store_pair(to, s, 16 * h + i, number(i, 0), number(i, 1));
    }
  }
}
#endif

// 32 inputs of a panel: of its two halves of columns kHalves from the `first` on.
template <WeightKind kKind, int kHalves = 2, typename T>
inline void unpack_group(const char* from, T* to, int first = 0) {
  if constexpr (kKind == WeightKind::kInt8) {
    unpack<kHalves>(*reinterpret_cast<const Int8Group*>(from), to, first);
  } else {
    unpack<kHalves>(*reinterpret_cast<const Int4Group*>(from), to, first);
  }
}

}  // namespace
}  // namespace tengserve
