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

template <typename T>
int64_t first_maximum(const T* x, int64_t size) {
  // The chunk that has it is looked through once more, so that no lane has to keep where its own is.
  constexpr int64_t kChunk = 1024;
  const float infinity = __builtin_inff();
  const Vec lowest = broadcast(-infinity), one = broadcast(1.0f);
  Vec usable = one;
  float best = -infinity;
  int64_t place = -1;
  for (int64_t chunk = 0; chunk < size; chunk += kChunk) {
    Vec largest = lowest;
    each_vec(size - chunk < kChunk ? size - chunk : kChunk, [&](int64_t c, int lanes) {
      const Vec a = load_lanes(x + chunk + c, lanes);
      largest = max(lanes == kLanes ? a : within(a, 0, lanes, lowest), largest);
      usable = min(usable, where_less(a, broadcast(infinity), one, zeros()));
    });
    const float found = largest_lane(largest);
    if (found > best) {
      best = found;
      place = chunk;
    }
  }
  if (place < 0 || largest_lane(one - usable) > 0) return -1;
  while (to_float(x[place]) != best) ++place;
  return place;
}

}  // namespace
}  // namespace tengserve
