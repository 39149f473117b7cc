#include "weight_memory.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>

namespace tengserve {
namespace {

constexpr int64_t kLargePage = 2 << 20;
// Address space that is taken at once; it becomes memory as weights come. Larger weights have some of their own.
constexpr int64_t kRegionBytes = 16 * kLargePage;
// Smaller tensors are read as fast from anywhere.
constexpr int64_t kLeastBytes = 1 << 16;
constexpr int64_t kAlignment = 64;

int64_t rounded_up(int64_t count, int64_t multiple) {
  return (count + multiple - 1) / multiple * multiple;
}

// Whole large pages, given back with the last tensor in them.
class Region {
 public:
  explicit Region(int64_t bytes) : bytes_(bytes), mapped_(bytes + kLargePage) {
    base_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base_ == MAP_FAILED) throw std::bad_alloc();
    start_ = reinterpret_cast<char*>(rounded_up(reinterpret_cast<intptr_t>(base_), kLargePage));
#ifdef MADV_HUGEPAGE
    madvise(start_, bytes_, MADV_HUGEPAGE);  // Without it, or refused, pages are as large as the system makes them.
#endif
  }
  ~Region() { munmap(base_, mapped_); }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  // Or null: it is full.
  char* take(int64_t bytes) {
    if (bytes > bytes_ - used_) return nullptr;
    char* const taken = start_ + used_;
    used_ += bytes;
    return taken;
  }
  // The last that was taken can be taken again: one that was packed to be tried, and is not wanted. Under others that
  // stay, pages go back to the system.
  void give_back(char* taken, int64_t bytes) {
    if (taken + bytes == start_ + used_) {
      used_ -= bytes;
      return;
    }
    const int64_t page = sysconf(_SC_PAGESIZE), from = taken - start_;
    const int64_t first = rounded_up(from, page), end = (from + bytes) / page * page;
    if (first < end) madvise(start_ + first, end - first, MADV_DONTNEED);
  }

 private:
  void* base_;
  char* start_;
  int64_t bytes_, mapped_, used_ = 0;
};

struct Current {
  std::mutex mutex;
  std::weak_ptr<Region> region;
};

Current& current() {
  static Current only;
  return only;
}

}  // namespace

at::Tensor weight_zeros(at::IntArrayRef sizes, at::ScalarType dtype) {
  const at::TensorOptions options(dtype);
  int64_t bytes = static_cast<int64_t>(c10::elementSize(dtype));
  for (const int64_t size : sizes) bytes *= size;
#ifdef __SANITIZE_ADDRESS__
  return at::zeros(sizes, options);  // It sees what is read beyond a tensor only where each has its own memory.
#endif
  if (bytes < kLeastBytes) return at::zeros(sizes, options);
  const int64_t whole = rounded_up(bytes, kAlignment);
  std::shared_ptr<Region> region;
  char* memory = nullptr;
  {
    const std::lock_guard<std::mutex> alone(current().mutex);
    region = current().region.lock();
    if (region) memory = region->take(whole);
    if (!memory) {
      region = std::make_shared<Region>(std::max(kRegionBytes, rounded_up(whole, kLargePage)));
      memory = region->take(whole);
      current().region = region;
    }
  }
  std::memset(memory, 0, bytes);
  const auto release = [region, whole](void* taken) {
    const std::lock_guard<std::mutex> alone(current().mutex);
    region->give_back(static_cast<char*>(taken), whole);
  };
  return at::from_blob(memory, sizes, release, options);
}

}  // namespace tengserve
