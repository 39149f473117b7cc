// Puts new tokens' keys and values into their slots.
#include <ATen/Parallel.h>

#include "operators.h"
#include "pages.h"

namespace tengserve {
namespace {

// Tokens a thread takes at least: a few microseconds of copying, so that waking it pays.
constexpr int64_t kGrain = 64;

template <typename T>
void write(const at::Tensor& key, const at::Tensor& value, const at::Tensor& keys, const at::Tensor& values,
           const int64_t* slots, const Pages& pages) {
  const T *from_keys = memory<const T>(key), *from_values = memory<const T>(value);
  T *to_keys = memory<T>(keys), *to_values = memory<T>(values);
  const auto key_strides = key.strides(), value_strides = value.strides();
  // One thread writes one slot, but two tokens may share a block: their elements are different ones.
  at::parallel_for(0, key.size(0), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t h = 0; h < pages.heads; ++h) {
        write_token(pages, from_keys + t * key_strides[0] + h * key_strides[1],
                    from_values + t * value_strides[0] + h * value_strides[1], slots[t], h, to_keys, to_values);
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
  const int64_t* numbers = check_slots(slots, tokens, pages);
  with_dtype(keys, [&](auto t) { write<decltype(t)>(key, value, keys, values, numbers, pages); });
}

}  // namespace tengserve
