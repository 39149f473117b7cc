// A layer's pages: the tensors [slots, heads, dim] whose memory the kernels lay out by block, see AttentionTile.
#pragma once

#include "checks.h"
#include "kernels.h"

namespace tengserve {

struct Pages {
  int64_t blocks, heads, key_dim, value_dim;
};

// Raises unless both are a layer's cache in blocks of block_size.
inline Pages check_pages(const at::Tensor& keys, const at::Tensor& values, int64_t block_size) {
  check_float(keys, "keys", 3);
  check_float(values, "values", 3);
  check_same_dtype(values, "values", keys, "keys");
  check_contiguous(keys, "keys");
  check_contiguous(values, "values");
  check_size(values, "values", 0, keys.size(0));
  check_size(values, "values", 1, keys.size(1));
  TORCH_CHECK(keys.size(1) > 0 && keys.size(2) > 0 && values.size(2) > 0,
              "keys and values must have heads and dimensions");
  TORCH_CHECK(block_size == kBlockSize, "block_size must be ", kBlockSize, ", not ", block_size);
  TORCH_CHECK(keys.size(0) % kBlockSize == 0, "keys must have whole blocks of ", kBlockSize, " slots, not ",
              keys.size(0), " slots");
  return {keys.size(0) / kBlockSize, keys.size(1), keys.size(2), values.size(2)};
}

}  // namespace tengserve
