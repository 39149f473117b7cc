// Puts new tokens' keys and values into their slots.
#include <ATen/Parallel.h>

#include "operators.h"
#include "pages.h"

namespace tengserve {
namespace {

// Tokens a thread takes at least: a few microseconds of copying, so that waking it pays.
constexpr int64_t kGrain = 64;

template <typename T>
void write_key(const T* key, int64_t dim, T* block, int64_t offset) {
  for (int64_t d = 0; d < dim; ++d) block[d * kBlockSize + offset] = key[d];
}

template <>
void write_key<Bf16>(const Bf16* key, int64_t dim, Bf16* block, int64_t offset) {
  for (int64_t d = 0; d + 1 < dim; d += 2) std::memcpy(block + d * kBlockSize + 2 * offset, key + d, 2 * sizeof(Bf16));
  if (dim % 2) block[(dim - 1) * kBlockSize + offset] = key[dim - 1];
}

template <typename T>
void write(const at::Tensor& key, const at::Tensor& value, const at::Tensor& keys, const at::Tensor& values,
           const int64_t* slots, const Pages& pages) {
  const T *from_keys = memory<const T>(key), *from_values = memory<const T>(value);
  T *to_keys = memory<T>(keys), *to_values = memory<T>(values);
  const auto key_strides = key.strides(), value_strides = value.strides();
  // One thread writes one slot, but two tokens may share a block: their elements are different ones.
  at::parallel_for(0, key.size(0), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t block = slots[t] / kBlockSize, offset = slots[t] % kBlockSize;
      for (int64_t h = 0; h < pages.heads; ++h) {
        const int64_t first = (block * pages.heads + h) * kBlockSize;
        write_key(from_keys + t * key_strides[0] + h * key_strides[1], pages.key_dim,
                  to_keys + first * pages.key_dim, offset);
        std::memcpy(to_values + (first + offset) * pages.value_dim,
                    from_values + t * value_strides[0] + h * value_strides[1], pages.value_dim * sizeof(T));
      }
    }
  });
}

}  // namespace

void paged_write(const at::Tensor& key, const at::Tensor& value, const at::Tensor& keys, const at::Tensor& values,
                 const at::Tensor& slots, int64_t block_size) {
  const Pages pages = check_pages(keys, values, block_size);
  const int64_t tokens = slots.numel();
  check_tensor(slots, "slots", 1);
  TORCH_CHECK(slots.scalar_type() == at::kLong, "slots must be int64, not ", slots.scalar_type());
  check_contiguous(slots, "slots");
  const auto check_new = [&](const at::Tensor& tensor, const char* name, int64_t dim) {
    check_float(tensor, name, 3);
    check_same_dtype(tensor, name, keys, "keys");
    check_size(tensor, name, 0, tokens);
    check_size(tensor, name, 1, pages.heads);
    check_size(tensor, name, 2, dim);
    check_contiguous_rows(tensor, name);
  };
  check_new(key, "key", pages.key_dim);
  check_new(value, "value", pages.value_dim);
  const int64_t* numbers = memory<const int64_t>(slots);
  for (int64_t t = 0; t < tokens; ++t) {
    TORCH_CHECK(numbers[t] >= 0 && numbers[t] < keys.size(0), "slot ", numbers[t], " of token ", t,
                " is outside the ", keys.size(0), " slots of the cache");
  }
  with_dtype(keys, [&](auto t) { write<decltype(t)>(key, value, keys, values, numbers, pages); });
}

}  // namespace tengserve
