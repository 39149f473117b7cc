// Sixteen float32 lanes in two 256-bit registers. Functions mean what they mean in vec_avx512.h.
#pragma once

#include <immintrin.h>

#include "bf16.h"

namespace tengserve {
namespace {

constexpr int kLanes = 16;

struct Vec {
  __m256 lo, hi;
};

inline Vec zeros() {
  return {_mm256_setzero_ps(), _mm256_setzero_ps()};
}
inline Vec broadcast(float x) {
  return {_mm256_set1_ps(x), _mm256_set1_ps(x)};
}

inline __m256 widen(const Bf16* p) {
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
inline Vec load(const float* p) {
  return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
inline Vec load(const Bf16* p) {
  return {widen(p), widen(p + 8)};
}
template <typename T>
inline Vec load_first(const T* p, int n) {
  T whole[kLanes] = {};
  std::memcpy(whole, p, n * sizeof(T));
  return load(whole);
}
inline void load_pairs(const Bf16* p, Vec& even, Vec& odd) {
  const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + kLanes));
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  even = {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
  odd = {_mm256_castsi256_ps(_mm256_and_si256(a, upper)), _mm256_castsi256_ps(_mm256_and_si256(b, upper))};
}

inline __m128i narrow(__m256 v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i even = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i sum = _mm256_add_epi32(bits, _mm256_add_epi32(even, _mm256_set1_epi32(0x7fff)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const __m256i words = _mm256_blendv_epi8(_mm256_srli_epi32(sum, 16), _mm256_set1_epi32(0x7fc0), nan);
  return _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}
inline void store(float* p, Vec a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline void store(Bf16* p, Vec a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(a.lo));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), narrow(a.hi));
}
template <typename T>
inline void store_first(T* p, Vec a, int n) {
  T whole[kLanes];
  store(whole, a);
  std::memcpy(p, whole, n * sizeof(T));
}

inline Vec operator+(Vec a, Vec b) {
  return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
inline Vec operator-(Vec a, Vec b) {
  return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
inline Vec operator*(Vec a, Vec b) {
  return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
inline Vec operator/(Vec a, Vec b) {
  return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
inline Vec fma(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline Vec max(Vec a, Vec b) {
  return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}
inline Vec min(Vec a, Vec b) {
  return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
}
inline Vec where_less(Vec a, Vec b, Vec yes, Vec no) {
  return {_mm256_blendv_ps(no.lo, yes.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)),
          _mm256_blendv_ps(no.hi, yes.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ))};
}
inline Vec within(Vec a, int from, int to, Vec other) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const auto keep = [=](int base) {
    return _mm256_castsi256_ps(_mm256_and_si256(_mm256_cmpgt_epi32(lanes, _mm256_set1_epi32(from - base - 1)),
                                                _mm256_cmpgt_epi32(_mm256_set1_epi32(to - base), lanes)));
  };
  return {_mm256_blendv_ps(other.lo, a.lo, keep(0)), _mm256_blendv_ps(other.hi, a.hi, keep(8))};
}
inline Vec power_of_two(Vec t, int bias) {
  const __m256i shift = _mm256_set1_epi32(bias - 127);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_sub_epi32(_mm256_castps_si256(t.lo), shift), 23)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_sub_epi32(_mm256_castps_si256(t.hi), shift), 23))};
}
inline float sum_of_lanes(Vec a) {
  const __m256 eight = _mm256_add_ps(a.lo, a.hi);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float largest_lane(Vec a) {
  const __m256 eight = _mm256_max_ps(a.lo, a.hi);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

// Registers: 16, so six rows of one Vec and what is multiplied with them.
constexpr int kTileRows = 6;
constexpr int kBlocksAtOnce = 1;
constexpr int kAccumulators = 6;
constexpr int kLinearRows = 6;
constexpr int kLinearVecs = 1;

}  // namespace
}  // namespace tengserve
