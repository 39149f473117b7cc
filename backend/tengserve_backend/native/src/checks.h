// What every operator asks of its tensors before it takes a pointer. A failed check raises c10::Error with a sentence.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include "bf16.h"

namespace tengserve {

inline void check_tensor(const at::Tensor& tensor, const char* name, int64_t dims) {
  TORCH_CHECK(tensor.defined() && tensor.device().is_cpu() && tensor.layout() == c10::kStrided, name,
              " must be a dense CPU tensor");
  TORCH_CHECK(dims < 0 || tensor.dim() == dims, name, " must have ", dims, " dimensions, not ", tensor.dim());
}

// float32 or bfloat16.
inline void check_float(const at::Tensor& tensor, const char* name, int64_t dims) {
  check_tensor(tensor, name, dims);
  TORCH_CHECK(tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kBFloat16, name,
              " must be float32 or bfloat16, not ", tensor.scalar_type());
}

inline void check_same_dtype(const at::Tensor& tensor, const char* name, const at::Tensor& other,
                             const char* other_name) {
  TORCH_CHECK(tensor.scalar_type() == other.scalar_type(), name, " is ", tensor.scalar_type(), " but ", other_name,
              " is ", other.scalar_type());
}

inline void check_contiguous_rows(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK(tensor.size(-1) <= 1 || tensor.stride(-1) == 1, "the last dimension of ", name, " must be contiguous");
}

inline void check_contiguous(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK(tensor.is_contiguous(), name, " must be contiguous");
}

inline void check_size(const at::Tensor& tensor, const char* name, int64_t dim, int64_t size) {
  TORCH_CHECK(tensor.size(dim) == size, "dimension ", dim, " of ", name, " must be ", size, ", not ", tensor.size(dim));
}

// The tensor's memory as the kernels' own types.
template <typename T>
inline T* memory(const at::Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

// Calls f with a value of the tensor's type.
template <typename F>
inline void with_dtype(const at::Tensor& tensor, F f) {
  if (tensor.scalar_type() == at::kFloat) {
    f(float{});
  } else {
    f(Bf16{});
  }
}

}  // namespace tengserve
