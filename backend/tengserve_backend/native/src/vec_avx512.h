// Sixteen float32 lanes in one 512-bit register.
#pragma once

#include <immintrin.h>

#include "bf16.h"

namespace tengserve {
namespace {

constexpr int kLanes = 16;

struct Vec {
  __m512 v;
};

inline __mmask16 first_lanes(int n) {
  return static_cast<__mmask16>((1u << n) - 1);
}

inline Vec zeros() {
  return {_mm512_setzero_ps()};
}
inline Vec broadcast(float x) {
  return {_mm512_set1_ps(x)};
}

inline __m512 widen(__m256i halves) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
inline Vec load(const float* p) {
  return {_mm512_loadu_ps(p)};
}
inline Vec load(const Bf16* p) {
  return {widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
// The first n (1 to 16) lanes; zero in the others, whose memory is not touched.
inline Vec load_first(const float* p, int n) {
  return {_mm512_maskz_loadu_ps(first_lanes(n), p)};
}
inline Vec load_first(const Bf16* p, int n) {
  return {widen(_mm256_maskz_loadu_epi16(first_lanes(n), p))};
}
// 32 values: lane i of `even` is value 2i, of `odd` value 2i + 1.
inline void load_pairs(const Bf16* p, Vec& even, Vec& odd) {
  const __m512i pairs = _mm512_loadu_si512(p);
  even.v = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  odd.v = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

inline __m256i narrow(__m512 v) {
#ifdef __AVX512BF16__
  return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v));
#else
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(even, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(
      _mm512_mask_mov_epi32(_mm512_srli_epi32(rounded, 16), nan, _mm512_set1_epi32(0x7fc0)));
#endif
}
inline void store(float* p, Vec a) {
  _mm512_storeu_ps(p, a.v);
}
inline void store(Bf16* p, Vec a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(a.v));
}
inline void store_first(float* p, Vec a, int n) {
  _mm512_mask_storeu_ps(p, first_lanes(n), a.v);
}
inline void store_first(Bf16* p, Vec a, int n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), narrow(a.v));
}

inline Vec operator+(Vec a, Vec b) {
  return {_mm512_add_ps(a.v, b.v)};
}
inline Vec operator-(Vec a, Vec b) {
  return {_mm512_sub_ps(a.v, b.v)};
}
inline Vec operator*(Vec a, Vec b) {
  return {_mm512_mul_ps(a.v, b.v)};
}
inline Vec operator/(Vec a, Vec b) {
  return {_mm512_div_ps(a.v, b.v)};
}
// a * b + c
inline Vec fma(Vec a, Vec b, Vec c) {
  return {_mm512_fmadd_ps(a.v, b.v, c.v)};
}
// b where either is a NaN.
inline Vec max(Vec a, Vec b) {
  return {_mm512_max_ps(a.v, b.v)};
}
inline Vec min(Vec a, Vec b) {
  return {_mm512_min_ps(a.v, b.v)};
}
inline Vec where_less(Vec a, Vec b, Vec yes, Vec no) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}
// a in lanes [from, to), elsewhere other.
inline Vec within(Vec a, int from, int to, Vec other) {
  return {_mm512_mask_blend_ps(static_cast<__mmask16>(first_lanes(to) & ~first_lanes(from)), other.v, a.v)};
}
// 2 to the power of (the integer in the lowest mantissa bits of t) - bias; see exp in vec_math.h.
inline Vec power_of_two(Vec t, int bias) {
  const __m512i n = _mm512_sub_epi32(_mm512_castps_si512(t.v), _mm512_set1_epi32(bias - 127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(n, 23))};
}
inline float sum_of_lanes(Vec a) {
  return _mm512_reduce_add_ps(a.v);
}
inline float largest_lane(Vec a) {
  return _mm512_reduce_max_ps(a.v);
}

#ifdef __AVX512BF16__
// acc + even * even + odd * odd of 16 pairs of bfloat16; `pair` is the same pair for all lanes.
inline Vec dot_pairs(Vec acc, const Bf16* pairs, uint32_t pair) {
  return {_mm512_dpbf16_ps(acc.v, reinterpret_cast<__m512bh>(_mm512_loadu_si512(pairs)),
                           reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(pair))))};
}
#endif

// Registers: 32. Query rows of an attention tile, key blocks read at once; rows and 16-column vectors of a linear tile.
constexpr int kTileRows = 8;
constexpr int kBlocksAtOnce = 2;
constexpr int kAccumulators = 24;
constexpr int kLinearRows = 12;
constexpr int kLinearVecs = 2;

}  // namespace
}  // namespace tengserve
