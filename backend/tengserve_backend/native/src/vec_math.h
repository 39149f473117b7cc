// exp, tanh and SiLU of sixteen lanes, written once for all instruction sets. Errors are a few units in the last place.
#pragma once

// A unit includes the vec_*.h of its instruction set before this.
namespace tengserve {
namespace {

constexpr float kInfinity = __builtin_inff();
// Below it exp is no normal float32.
constexpr float kExpLowest = -87.3f;

// e to the power of x for x in [-87.3, 88]; x outside is taken as the nearest of these, a NaN stays one.
inline Vec exp(Vec x) {
  // Adding 1.5 * 2^23 leaves the nearest integer in the lowest bits of the sum: x = n * ln 2 + r, |r| <= ln 2 / 2.
  constexpr float kRounder = 12582912.0f;
  constexpr int kRounderBits = 0x4b400000;
  x = min(broadcast(88.0f), max(broadcast(kExpLowest), x));
  const Vec shifted = x * broadcast(1.44269504f) + broadcast(kRounder);
  const Vec n = shifted - broadcast(kRounder);
  // ln 2 in two parts: the first has few bits, so n times it is exact.
  Vec r = fma(n, broadcast(-0.693359375f), x);
  r = fma(n, broadcast(2.12194440e-4f), r);
  // Minimax polynomial of (exp(r) - 1 - r) / r^2 on that range (Cephes' coefficients).
  Vec p = broadcast(1.9875691500e-4f);
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  p = fma(p, r * r, r + broadcast(1.0f));
  return p * power_of_two(shifted, kRounderBits);
}

// The same for a softmax: zero where exp would be no normal number, minus infinity included.
inline Vec exp_or_zero(Vec x) {
  return where_less(x, broadcast(kExpLowest), zeros(), exp(x));
}

inline float exp_or_zero(float x) {
  float lanes[kLanes];
  store(lanes, exp_or_zero(broadcast(x)));
  return lanes[0];
}

inline Vec tanh(Vec x) {
  const Vec squared = x * x;
  // Near zero 1 - 2 / (exp(2x) + 1) would cancel; an odd polynomial does not (Cephes' coefficients).
  Vec p = broadcast(-5.70498872745e-3f);
  p = fma(p, squared, broadcast(2.06390887954e-2f));
  p = fma(p, squared, broadcast(-5.37397155531e-2f));
  p = fma(p, squared, broadcast(1.33314422036e-1f));
  p = fma(p, squared, broadcast(-3.33332819422e-1f));
  const Vec small = fma(p * squared, x, x);
  const Vec large = broadcast(1.0f) - broadcast(2.0f) / (exp(x + x) + broadcast(1.0f));
  return where_less(squared, broadcast(0.625f * 0.625f), small, large);
}

inline Vec silu(Vec x) {
  return x / (broadcast(1.0f) + exp(zeros() - x));
}

// The value that a T can hold.
inline Vec rounded(Vec a, const float*) {
  return a;
}
inline Vec rounded(Vec a, const Bf16*) {
  Bf16 held[kLanes];
  store(held, a);
  return load(held);
}

}  // namespace
}  // namespace tengserve
