// What a model does to a row between its linears, see kernels.h. Roundings are those of the torch code that it
// replaces.
#pragma once

#include "kernels.h"

namespace tengserve {
namespace {

// Calls f(column, lanes) over a row; only the last call has fewer lanes than a Vec.
template <typename F>
inline void each_vec(int64_t size, F f) {
  int64_t c = 0;
  for (; c + kLanes <= size; c += kLanes) f(c, kLanes);
  if (c < size) f(c, static_cast<int>(size - c));
}

template <typename T>
inline Vec load_lanes(const T* p, int lanes) {
  return lanes == kLanes ? load(p) : load_first(p, lanes);
}

template <typename T>
inline void store_lanes(T* p, Vec a, int lanes) {
  if (lanes == kLanes) {
    store(p, a);
  } else {
    store_first(p, a, lanes);
  }
}

template <typename T>
void rms_norm(const T* x, const T* weight, float eps, int64_t size, T* out) {
  Vec squares = zeros();
  each_vec(size, [&](int64_t c, int lanes) {
    const Vec a = load_lanes(x + c, lanes);
    squares = fma(a, a, squares);
  });
  const Vec factor = broadcast(1.0f / __builtin_sqrtf(sum_of_lanes(squares) / static_cast<float>(size) + eps));
  each_vec(size, [&](int64_t c, int lanes) {
    const Vec normed = rounded(load_lanes(x + c, lanes) * factor, x);
    store_lanes(out + c, normed * load_lanes(weight + c, lanes), lanes);
  });
}

template <typename T>
void silu_mul(const T* gate, const T* up, int64_t size, T* out) {
  each_vec(size, [&](int64_t c, int lanes) {
    const Vec gated = rounded(silu(load_lanes(gate + c, lanes)), gate);
    store_lanes(out + c, gated * load_lanes(up + c, lanes), lanes);
  });
}

template <typename T>
void rotary(const T* x, const T* cos, const T* sin, int64_t size, T* out) {
  const int64_t half = size / 2;
  each_vec(half, [&](int64_t c, int lanes) {
    const Vec a = load_lanes(x + c, lanes), b = load_lanes(x + half + c, lanes);
    const Vec a_cos = rounded(a * load_lanes(cos + c, lanes), x);
    const Vec b_sin = rounded(b * load_lanes(sin + c, lanes), x);
    const Vec b_cos = rounded(b * load_lanes(cos + half + c, lanes), x);
    const Vec a_sin = rounded(a * load_lanes(sin + half + c, lanes), x);
    store_lanes(out + c, a_cos - b_sin, lanes);
    store_lanes(out + half + c, b_cos + a_sin, lanes);
  });
}

template <typename T>
void add(const T* a, const T* b, int64_t size, T* out) {
  each_vec(size, [&](int64_t c, int lanes) {
    store_lanes(out + c, load_lanes(a + c, lanes) + load_lanes(b + c, lanes), lanes);
  });
}

}  // namespace
}  // namespace tengserve
