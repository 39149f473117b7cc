// A layer's pages: the tensors [slots, heads, dim] whose memory the kernels lay out by block, see AttentionTile.
#pragma once

#include <cstring>

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

// The numbers of the slots that new tokens go to, int64 [tokens].
inline const int64_t* check_slots(const at::Tensor& slots, int64_t tokens, const Pages& pages) {
  check_tensor(slots, "slots", 1);
  TORCH_CHECK(slots.scalar_type() == at::kLong, "slots must be int64, not ", slots.scalar_type());
  check_contiguous(slots, "slots");
  check_size(slots, "slots", 0, tokens);
  const int64_t* numbers = memory<const int64_t>(slots);
  const int64_t count = pages.blocks * kBlockSize;
  for (int64_t t = 0; t < tokens; ++t) {
    TORCH_CHECK(numbers[t] >= 0 && numbers[t] < count, "slot ", numbers[t], " of token ", t, " is outside the ", count,
                " slots of the cache");
  }
  return numbers;
}

// One key into its place in a block of a head.
template <typename T>
inline void write_key(const T* key, int64_t dim, T* block, int64_t offset) {
  for (int64_t d = 0; d < dim; ++d) block[d * kBlockSize + offset] = key[d];
}

template <>
inline void write_key<Bf16>(const Bf16* key, int64_t dim, Bf16* block, int64_t offset) {
  for (int64_t d = 0; d + 1 < dim; d += 2) std::memcpy(block + d * kBlockSize + 2 * offset, key + d, 2 * sizeof(Bf16));
  if (dim % 2) block[(dim - 1) * kBlockSize + offset] = key[dim - 1];
}

// A token's key and value of one head into a slot of a layer's pages, whose memory begins at keys and values.
template <typename T>
inline void write_token(const Pages& pages, const T* key, const T* value, int64_t slot, int64_t head, T* keys,
                        T* values) {
  const int64_t first = (slot / kBlockSize * pages.heads + head) * kBlockSize, offset = slot % kBlockSize;
  write_key(key, pages.key_dim, keys + first * pages.key_dim, offset);
  std::memcpy(values + (first + offset) * pages.value_dim, value, pages.value_dim * sizeof(T));
}

}  // namespace tengserve
