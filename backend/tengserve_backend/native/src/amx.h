// The matrix unit's tiles: eight of 16 rows of 64 bytes. A row of a product depends on its own row of the left factor
// only.
#pragma once

#include <immintrin.h>

#include "bf16.h"

namespace tengserve {
namespace {

constexpr int kTileHeight = 16;
constexpr int64_t kTileBytes = 64;

// What `ldtilecfg` reads. A tile of no rows must not be used.
struct alignas(64) TileShapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int height, int64_t bytes) {
    rows[tile] = static_cast<uint8_t>(height);
    row_bytes[tile] = height ? static_cast<uint16_t>(bytes) : uint16_t{0};
  }
};
static_assert(sizeof(TileShapes) == 64);

// Before tiles are loaded from what was just written: compilers do not see that those instructions read it.
inline void written_for_tiles() {
  __asm__ volatile("" ::: "memory");
}

// The unit has these shapes while it lives; afterwards its registers are free, which spares the thread's context
// switches their 8 KiB.
class TilesInUse {
 public:
  explicit TilesInUse(const TileShapes& shapes) {
    written_for_tiles();
    _tile_loadconfig(&shapes);
  }
  ~TilesInUse() { _tile_release(); }
  TilesInUse(const TilesInUse&) = delete;
  TilesInUse& operator=(const TilesInUse&) = delete;
};

}  // namespace
}  // namespace tengserve
