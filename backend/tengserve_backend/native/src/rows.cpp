// What a model does between its linears, a row at a time.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "checks.h"
#include "isa.h"
#include "operators.h"

namespace tengserve {
namespace {

// Elements that a thread takes at least, so that waking it pays.
constexpr int64_t kGrain = 16384;

template <typename F>
void each_row(int64_t rows, int64_t size, F f) {
  at::parallel_for(0, rows, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, size)), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) f(row);
  });
}

template <typename T>
void rotate(const at::Tensor& x, const T* cos, const T* sin, const at::Tensor& out) {
  const int64_t heads = x.size(1), tokens = x.size(2), dim = x.size(3);
  const int64_t head_stride = x.stride(1), token_stride = x.stride(2);
  const T* from = memory<const T>(x);
  T* to = memory<T>(out);
  const auto kernel = level().kernels<T>().row.rotary;
  each_row(tokens, heads * dim, [&](int64_t t) {
    for (int64_t h = 0; h < heads; ++h) {
      kernel(from + h * head_stride + t * token_stride, cos + t * dim, sin + t * dim, dim, to + (t * heads + h) * dim);
    }
  });
}

}  // namespace

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  check_float(x, "x", -1);
  TORCH_CHECK(x.dim() >= 1, "x must have a dimension");
  check_tensor(weight, "weight", 1);
  check_same_dtype(weight, "weight", x, "x");
  check_size(weight, "weight", 0, x.size(-1));
  check_contiguous(weight, "weight");
  const at::Tensor source = x.contiguous();
  at::Tensor out = at::empty(x.sizes(), x.options());
  if (out.numel() == 0) return out;
  const int64_t size = x.size(-1);
  with_dtype(x, [&](auto t) {
    using T = decltype(t);
    const T *from = memory<const T>(source), *factors = memory<const T>(weight);
    T* to = memory<T>(out);
    const auto kernel = level().kernels<T>().row.rms_norm;
    each_row(x.numel() / size, size, [&](int64_t row) {
      kernel(from + row * size, factors, static_cast<float>(eps), size, to + row * size);
    });
  });
  return out;
}

at::Tensor silu_mul(const at::Tensor& gate_up) {
  check_float(gate_up, "gate_up", -1);
  TORCH_CHECK(gate_up.dim() >= 1 && gate_up.size(-1) % 2 == 0, "the last dimension of gate_up must be even");
  const at::Tensor source = gate_up.contiguous();
  auto sizes = gate_up.sizes().vec();
  const int64_t size = sizes.back() /= 2;
  at::Tensor out = at::empty(sizes, gate_up.options());
  if (out.numel() == 0) return out;
  with_dtype(gate_up, [&](auto t) {
    using T = decltype(t);
    const T* from = memory<const T>(source);
    T* to = memory<T>(out);
    const auto kernel = level().kernels<T>().row.silu_mul;
    each_row(out.numel() / size, size, [&](int64_t row) {
      kernel(from + row * 2 * size, from + row * 2 * size + size, size, to + row * size);
    });
  });
  return out;
}

std::tuple<at::Tensor, at::Tensor> rotary(const at::Tensor& query, const at::Tensor& key, const at::Tensor& cos,
                                          const at::Tensor& sin) {
  check_float(query, "query", 4);
  const int64_t tokens = query.size(2), dim = query.size(3);
  TORCH_CHECK(dim > 0 && dim % 2 == 0, "the last dimension of query must be even, not ", dim);
  const auto check_rotated = [&](const at::Tensor& x, const char* name) {
    check_tensor(x, name, 4);
    check_same_dtype(x, name, query, "query");
    check_size(x, name, 0, 1);
    check_size(x, name, 2, tokens);
    check_size(x, name, 3, dim);
    check_contiguous_rows(x, name);
  };
  const auto check_angles = [&](const at::Tensor& x, const char* name) {
    check_tensor(x, name, 3);
    check_same_dtype(x, name, query, "query");
    check_size(x, name, 0, 1);
    check_size(x, name, 1, tokens);
    check_size(x, name, 2, dim);
    check_contiguous(x, name);
  };
  check_rotated(query, "query");
  check_rotated(key, "key");
  check_angles(cos, "cos");
  check_angles(sin, "sin");
  // In memory by token, as attention and the cache read them next.
  const auto rotated = [&](const at::Tensor& x) {
    at::Tensor out = at::empty({1, tokens, x.size(1), dim}, x.options());
    with_dtype(x, [&](auto t) {
      using T = decltype(t);
      rotate<T>(x, memory<const T>(cos), memory<const T>(sin), out);
    });
    return out.transpose(1, 2);
  };
  return {rotated(query), rotated(key)};
}

at::Tensor first_maxima(const at::Tensor& x) {
  check_float(x, "x", 2);
  const at::Tensor source = x.contiguous();
  at::Tensor out = at::empty({x.size(0)}, x.options().dtype(at::kLong));
  const int64_t size = x.size(1);
  with_dtype(x, [&](auto t) {
    using T = decltype(t);
    const T* from = memory<const T>(source);
    int64_t* to = out.data_ptr<int64_t>();
    const auto kernel = level().kernels<T>().row.first_maximum;
    each_row(x.size(0), size, [&](int64_t row) { to[row] = kernel(from + row * size, size); });
  });
  return out;
}

}  // namespace tengserve
