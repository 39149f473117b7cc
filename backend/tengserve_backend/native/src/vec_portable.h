// Sixteen float32 lanes as four 128-bit vectors of the compiler's own: SSE2 on x86-64, NEON on ARM. Functions mean what
// they mean in vec_avx512.h.
#pragma once

#include "bf16.h"

namespace tengserve {
namespace {

constexpr int kLanes = 16;

typedef float Quad __attribute__((vector_size(16)));
typedef int32_t QuadInt __attribute__((vector_size(16)));

struct Vec {
  Quad v[4];
};

template <typename F>
inline Vec each_quad(F f) {
  return {{f(0), f(1), f(2), f(3)}};
}
inline Quad splat(float x) {
  return Quad{x, x, x, x};
}
inline Quad select(QuadInt mask, Quad yes, Quad no) {
  return reinterpret_cast<Quad>((mask & reinterpret_cast<QuadInt>(yes)) | (~mask & reinterpret_cast<QuadInt>(no)));
}

inline Vec broadcast(float x) {
  return each_quad([=](int) { return splat(x); });
}
inline Vec zeros() {
  return broadcast(0.0f);
}

inline Vec load(const float* p) {
  Vec a;
  std::memcpy(&a, p, sizeof a);
  return a;
}
inline Vec load(const Bf16* p) {
  return each_quad([=](int i) {
    const Bf16* q = p + 4 * i;
    return Quad{to_float(q[0]), to_float(q[1]), to_float(q[2]), to_float(q[3])};
  });
}
template <typename T>
inline Vec load_first(const T* p, int n) {
  T whole[kLanes] = {};
  std::memcpy(whole, p, n * sizeof(T));
  return load(whole);
}
inline void load_pairs(const Bf16* p, Vec& even, Vec& odd) {
  for (int i = 0; i < 4; ++i) {
    QuadInt pairs;
    std::memcpy(&pairs, p + 8 * i, sizeof pairs);
    even.v[i] = reinterpret_cast<Quad>(pairs << 16);
    odd.v[i] = reinterpret_cast<Quad>(pairs & static_cast<int32_t>(0xffff0000u));
  }
}

inline void store(float* p, Vec a) {
  std::memcpy(p, &a, sizeof a);
}
inline void store(Bf16* p, Vec a) {
  float lanes[kLanes];
  store(lanes, a);
  for (int i = 0; i < kLanes; ++i) p[i] = from_float<Bf16>(lanes[i]);
}
template <typename T>
inline void store_first(T* p, Vec a, int n) {
  T whole[kLanes];
  store(whole, a);
  std::memcpy(p, whole, n * sizeof(T));
}

inline Vec operator+(Vec a, Vec b) {
  return each_quad([&](int i) { return a.v[i] + b.v[i]; });
}
inline Vec operator-(Vec a, Vec b) {
  return each_quad([&](int i) { return a.v[i] - b.v[i]; });
}
inline Vec operator*(Vec a, Vec b) {
  return each_quad([&](int i) { return a.v[i] * b.v[i]; });
}
inline Vec operator/(Vec a, Vec b) {
  return each_quad([&](int i) { return a.v[i] / b.v[i]; });
}
inline Vec fma(Vec a, Vec b, Vec c) {
#ifdef __FP_FAST_FMAF
  Vec d;
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 4; ++j) d.v[i][j] = __builtin_fmaf(a.v[i][j], b.v[i][j], c.v[i][j]);
  }
  return d;
#else
  return each_quad([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
#endif
}
inline Vec max(Vec a, Vec b) {
  return each_quad([&](int i) { return select(a.v[i] > b.v[i], a.v[i], b.v[i]); });
}
inline Vec min(Vec a, Vec b) {
  return each_quad([&](int i) { return select(a.v[i] < b.v[i], a.v[i], b.v[i]); });
}
inline Vec where_less(Vec a, Vec b, Vec yes, Vec no) {
  return each_quad([&](int i) { return select(a.v[i] < b.v[i], yes.v[i], no.v[i]); });
}
inline Vec within(Vec a, int from, int to, Vec other) {
  return each_quad([&](int i) {
    const QuadInt lane = QuadInt{0, 1, 2, 3} + 4 * i;
    return select((lane >= from) & (lane < to), a.v[i], other.v[i]);
  });
}
inline Vec power_of_two(Vec t, int bias) {
  return each_quad([&](int i) {
    return reinterpret_cast<Quad>((reinterpret_cast<QuadInt>(t.v[i]) - (bias - 127)) << 23);
  });
}
inline float sum_of_lanes(Vec a) {
  const Quad four = (a.v[0] + a.v[1]) + (a.v[2] + a.v[3]);
  return (four[0] + four[1]) + (four[2] + four[3]);
}
inline float largest_lane(Vec a) {
  const auto of = [](Quad x, Quad y) { return select(x > y, x, y); };
  const Quad four = of(of(a.v[0], a.v[1]), of(a.v[2], a.v[3]));
  float result = four[0];
  for (int i = 1; i < 4; ++i) result = four[i] > result ? four[i] : result;
  return result;
}

// Registers of 128 bits: 16 on x86-64, 32 on ARM; four make a Vec.
#ifdef __x86_64__
constexpr int kTileRows = 2;
#else
constexpr int kTileRows = 6;
#endif
constexpr int kBlocksAtOnce = 1;
constexpr int kAccumulators = kTileRows;
constexpr int kLinearRows = kTileRows;
constexpr int kLinearVecs = 1;

}  // namespace
}  // namespace tengserve
