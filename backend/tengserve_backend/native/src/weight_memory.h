// Memory for packed weights: side by side in large pages, where the system has them. A step reads every weight once, so
// with small ones it looks up an address for every 4 KiB.
#pragma once

#include <ATen/core/Tensor.h>

namespace tengserve {

// A contiguous tensor of zeros. Raises std::bad_alloc where there is no memory.
at::Tensor weight_zeros(at::IntArrayRef sizes, at::ScalarType dtype);

}  // namespace tengserve
